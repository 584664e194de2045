/* Linear maps that share their input, forward and backward. What each function computes stands in gnomon.h.
 *
 * Rows are cut into tiles; a thread takes a tile through every map while its inputs are in cache. In the gradient of a weight the sum runs
 * over the rows, so there threads take rows of the weight instead and walk the tokens in blocks of STEPS, in order. Small weights stay in
 * cache while the tokens pass; rows of large ones are taken OUTS at a time, and the tokens pass for each.
 */
#include <algorithm>
#include <memory>

#include "gnomon.h"
#include "product.h"

namespace {

using namespace gnomon;

const int64_t ROWS = 96;   /* of one tile: a multiple of the kernel's six */
const int64_t STEPS = 256; /* tokens of one block of a weight's gradient: a panel of them stays in the second-level cache */
const int64_t OUTS = 24;   /* rows of a weight in one task of its gradient */
const int64_t SMALL = 1 << 16; /* values of the gradients that a thread keeps in cache */
const int64_t NARROW = 256;    /* inputs that are read where they lie: their rows share few pages */

int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* Each map's panels, one after another. */
struct Panels {
    std::unique_ptr<float[]> memory;
    std::unique_ptr<const float*[]> start;

    /* `transposed`: for x W' from W [out, in]; else for dy W. */
    Panels(const float* const* weights, const int64_t* outs, int64_t count, int64_t in, bool transposed, int32_t threads)
        : start(new const float*[count]) {
        int64_t size = 0, panels = 0;
        for (int64_t i = 0; i < count; ++i) size += transposed ? packed_size(in, outs[i]) : packed_size(outs[i], in);
        memory.reset(new float[size]);
        float* next = memory.get();
        for (int64_t i = 0; i < count; ++i) {
            start[i] = next;
            next += transposed ? packed_size(in, outs[i]) : packed_size(outs[i], in);
            panels += tiles(transposed ? outs[i] : in, STRIPE);
        }
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t panel = 0; panel < panels; ++panel) {
            int64_t i = 0, own = panel;
            for (int64_t here; own >= (here = tiles(transposed ? outs[i] : in, STRIPE)); ++i) own -= here;
            const int64_t column = own * STRIPE, width = std::min(STRIPE, (transposed ? outs[i] : in) - column);
            float* to = const_cast<float*>(start[i]) + column * (transposed ? in : outs[i]);
            if (transposed) pack_transposed(weights[i] + column * in, in, in, width, to);
            else pack(weights[i] + column, in, outs[i], width, to);
        }
    }
};

}  // namespace

extern "C" void gnomon_linear_forward(const float* x, int64_t rows, int64_t in, const float* const* weights, const int64_t* outs,
                                      int64_t count, float* const* y, int32_t threads) {
    const Panels panels(weights, outs, count, in, true, threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t i = 0; i < count; ++i)
            multiply({x + row * in, in, panels.start[i], y[i] + row * outs[i], outs[i], std::min(ROWS, rows - row), in, 0, outs[i], false,
                      false});
}

extern "C" void gnomon_linear_backward_input(const float* const* d_y, int64_t rows, int64_t in, const float* const* weights,
                                             const int64_t* outs, int64_t count, float* d_x, int32_t threads) {
    const Panels panels(weights, outs, count, in, false, threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t i = 0; i < count; ++i)
            multiply({d_y[i] + row * outs[i], outs[i], panels.start[i], d_x + row * in, in, std::min(ROWS, rows - row), outs[i], 0, in,
                      false, i > 0});
}

extern "C" void gnomon_linear_backward_weights(const float* x, const float* const* d_y, int64_t rows, int64_t in, const int64_t* outs,
                                               int64_t count, float* const* d_weights, int32_t threads) {
    const bool packed = in % 16 != 0 || in > NARROW;
    const int64_t blocks = tiles(rows, STEPS), block_size = packed ? packed_size(STEPS, in) : STEPS * in;
    const std::unique_ptr<float[]> panels(packed ? new float[blocks * block_size] : nullptr);
    const float* const columns = packed ? panels.get() : x;
    if (packed) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t row = block * STEPS;
            pack(x + row * in, in, std::min(STEPS, rows - row), in, panels.get() + block * block_size);
        }
    }
    int64_t tasks = 0, all = 0;
    for (int64_t i = 0; i < count; ++i) tasks += tiles(outs[i], OUTS), all += outs[i];
    const auto add_block = [&](int64_t task, int64_t block) {
        int64_t i = 0, own = task;
        for (int64_t here; own >= (here = tiles(outs[i], OUTS)); ++i) own -= here;
        const int64_t out = own * OUTS, width = std::min(OUTS, outs[i] - out), row = block * STEPS;
        float* to = d_weights[i] + out * in;
        if (!rows) std::fill_n(to, width * in, 0.0f);
        else multiply({d_y[i] + row * outs[i] + out, outs[i], columns + block * block_size, to, in, width, std::min(STEPS, rows - row), 0,
                       in, true, row > 0, packed ? 0 : in});
    };
    const int64_t group = all * in <= SMALL * threads ? tiles(tasks, threads) : 1; /* tasks that pass over the tokens together */
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t first = 0; first < tasks; first += group)
        for (int64_t block = 0; block < std::max<int64_t>(blocks, 1); ++block)
            for (int64_t task = first; task < std::min(tasks, first + group); ++task) add_block(task, block);
}

/* Products with packed matrices: choosing the instructions, rounding the inputs, sharing groups of outputs among threads. */
#include "matrix.h"

#include <algorithm>
#include <cstdlib>

#include "lanes.h"
#include "matrix_work.h"
#include "memory.h"

namespace gnomon {

namespace {

const Kernels& best() {
#if defined(__x86_64__) && defined(__GNUC__)
    const int set = instruction_set();
    if (set == 4) return has_bf16_dots() ? kernels_v4_bf16 : kernels_v4;
    if (set == 3) return kernels_v3;
#endif
    return kernels_portable;
}

const int64_t PIECE = 1 << 16;   /* bytes of weights of one task: large against handing it out, small against a matrix */
const int64_t SMALL_INPUT = 1 << 15; /* values that one thread rounds faster than several agree to */

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* How one matrix is cut: `groups` of outputs at a time, ROW_BLOCK rows at a time. */
struct Cut {
    int64_t groups, tasks_across, tasks;
    Cut(const Matrix& w, int64_t rows) {
        const int64_t all = ceil_div(w.out, GROUP), bytes = group_bytes(w);
        groups = std::max<int64_t>(1, PIECE / std::max<int64_t>(1, bytes * std::min(rows, ROW_BLOCK) / 2));
        tasks_across = ceil_div(all, groups);
        tasks = tasks_across * ceil_div(rows, ROW_BLOCK);
    }
};

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = best();
    return chosen;
}

int64_t group_bytes(const Matrix& w) {
    return w.format == F32 ? GROUP * w.in * 4 : w.format == BF16 ? GROUP * ((w.in + 1) / 2) * 4 : GROUP * w.in / 2;
}

char* Scratch::get(int64_t bytes) {
    if (bytes > size) {
        std::free(memory);
        memory = static_cast<char*>(allocate(bytes));
        size = bytes;
    }
    return memory;
}

Scratch::~Scratch() { std::free(memory); }

Scratch& scratch(Use use) {
    static thread_local Scratch of_thread[USES];
    return of_thread[use];
}

Inputs Inputs::from(int64_t row) const {
    const char* at = static_cast<const char*>(rounded);
    return {plain + row * plain_stride, plain_stride, at ? at + row * rounded_stride * kernels().input_bytes : nullptr, rounded_stride};
}

void multiply_groups(const Matrix& w, int64_t first, int64_t last, const Inputs& x, int64_t rows, float* y, int64_t y_stride, bool add) {
    const Kernels& k = kernels();
    Tile t{};
    t.in = w.in;
    t.x = w.format == F32 ? x.plain : x.rounded;
    t.x_stride = w.format == F32 ? x.plain_stride : x.rounded_stride;
    t.rows = rows;
    t.y_stride = y_stride;
    t.add = add;
    t.scratch = scratch(TILE).get(k.scratch_bytes);
    for (int64_t group = first; group < last; ++group) {
        t.out = std::min(GROUP, w.out - group * GROUP);
        t.lanes = ceil_div(t.out, PANEL) * PANEL;
        t.w = static_cast<const char*>(w.data) + group * group_bytes(w);
        t.scales = w.format == MXFP4 ? w.scales + group * GROUP * (w.in / BLOCK) : nullptr;
        t.y = y + (group - first) * GROUP;
        k.multiply[w.format](t);
    }
}

int64_t rounded_stride(int64_t in) { return in + in % 2; }

void round_rows(const float* x, int64_t rows, int64_t stride, int64_t in, char* to) {
    const Kernels& k = kernels();
    for (int64_t row = 0; row < rows; ++row) k.prepare(x + row * stride, in, to + row * rounded_stride(in) * k.input_bytes);
}

Inputs prepare(Pool& pool, const float* x, int64_t rows, int64_t stride, int64_t in, bool round, Scratch& room) {
    Inputs result{x, stride, nullptr, rounded_stride(in)};
    if (!round) return result;
    const int64_t row_bytes = result.rounded_stride * kernels().input_bytes;
    char* to = room.get(std::max<int64_t>(rows * row_bytes, 1));
    result.rounded = to;
    const int64_t step = std::max<int64_t>(1, SMALL_INPUT / std::max<int64_t>(in, 1));
    parallel(pool, ceil_div(rows, step), [&](int64_t task, int) {
        const int64_t row = task * step;
        round_rows(x + row * stride, std::min(step, rows - row), stride, in, to + row * row_bytes);
    });
    return result;
}

void multiply(Pool& pool, const Matrix& w, const float* x, int64_t rows, int64_t x_stride, float* y, int64_t y_stride, bool add) {
    const Inputs inputs = prepare(pool, x, rows, x_stride, w.in, w.format != F32, scratch(INPUTS));
    const Cut cut(w, rows);
    const int64_t groups = ceil_div(w.out, GROUP);
    parallel(pool, cut.tasks, [&](int64_t task, int) {
        const int64_t row = task / cut.tasks_across * ROW_BLOCK, first = task % cut.tasks_across * cut.groups;
        multiply_groups(w, first, std::min(first + cut.groups, groups), inputs.from(row), std::min(ROW_BLOCK, rows - row),
                        y + row * y_stride + first * GROUP, y_stride, add);
    });
}

void multiply_many(Pool& pool, const Matrix* const* w, float* const* y, int64_t count, const float* x, int64_t rows, int64_t x_stride) {
    bool round = false;
    int64_t tasks = 0;
    for (int64_t i = 0; i < count; ++i) round = round || w[i]->format != F32, tasks += Cut(*w[i], rows).tasks;
    if (tasks == 0) return;
    const Inputs inputs = prepare(pool, x, rows, x_stride, w[0]->in, round, scratch(INPUTS));
    parallel(pool, tasks, [&](int64_t task, int) {
        int64_t i = 0;
        Cut cut(*w[0], rows);
        for (; task >= cut.tasks; cut = Cut(*w[++i], rows)) task -= cut.tasks;
        const int64_t row = task / cut.tasks_across * ROW_BLOCK, first = task % cut.tasks_across * cut.groups;
        const int64_t last = std::min(first + cut.groups, ceil_div(w[i]->out, GROUP));
        multiply_groups(*w[i], first, last, inputs.from(row), std::min(ROW_BLOCK, rows - row),
                        y[i] + row * w[i]->out + first * GROUP, w[i]->out, false);
    });
}

}  // namespace gnomon

extern "C" void gnomon_matrix_multiply(const gnomon_matrix* w, const float* x, int64_t rows, int64_t x_stride, float* y, int64_t y_stride,
                                       int32_t add, int32_t threads) {
    gnomon::multiply(gnomon::pool(threads), *w, x, rows, x_stride, y, y_stride, add != 0);
}

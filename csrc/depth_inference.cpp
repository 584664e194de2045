/* The depth read for inference; depth.h says what each function computes. */
#include "depth.h"

#include <algorithm>
#include <vector>

#include "depth_rows.h"
#include "gnomon.h"

namespace gnomon {
namespace {

const int64_t SMALL = 1 << 16; /* values that one thread reads sooner than it wakes another */

/* Writes values and their norm: out = x / sqrt(mean x^2 + eps) weight, from x in `out` and the sum of its squares. */
template <int W>
INLINE void normalise(const DepthRead& read, float square, float* out) {
    const float scale = 1.0f / std::sqrt(square / static_cast<float>(read.width) + read.eps);
    int64_t i = 0;
    for (; i + W <= read.width; i += W) store<W>(out + i, load<W>(out + i) * scale * load<W>(read.norm + i));
    for (; i < read.width; ++i) out[i] = out[i] * scale * read.norm[i];
}

/* out = sum_j p[j] source_j over one row, and the sum of its squares. */
template <int W>
INLINE float mix(const float* const* sources, const float* p, int64_t count, int64_t offset, int64_t width, float* out) {
    vec<W> squares = {};
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        vec<W> mixed = {};
        for (int64_t j = 0; j < count; ++j) mixed += p[j] * load<W>(sources[j] + offset + i);
        store<W>(out + i, mixed);
        squares += mixed * mixed;
    }
    float tail = 0.0f;
    for (; i < width; ++i) {
        float mixed = 0.0f;
        for (int64_t j = 0; j < count; ++j) mixed += p[j] * sources[j][offset + i];
        out[i] = mixed;
        tail += mixed * mixed;
    }
    return sum<W>(squares) + tail;
}

struct Rows {
    const float* const* sources;
    int64_t count, first, last;
};

template <int W>
INLINE void finish(const DepthRead& read, float square, float* mixed, float* out) {
    if (mixed) std::copy_n(out, read.width, mixed);
    if (read.norm) normalise<W>(read, square, out);
}

template <int W>
INLINE void read_rows_body(const DepthRead& read, const Rows& r, float* p, float* mixed, float* out) {
    for (int64_t row = r.first; row < r.last; ++row) {
        const int64_t offset = row * read.width;
        float largest = -INFINITY, total = 0.0f, unused;
        for (int64_t j = 0; r.count > 1 && j < r.count; ++j)
            largest = std::max(largest, p[j] = score<W>(read.query, r.sources[j] + offset, read.width, read.eps, &unused));
        if (r.count == 1) p[0] = largest = 0.0f;
        for (int64_t j = 0; j < r.count; ++j) total += p[j] = std::exp(p[j] - largest);
        for (int64_t j = 0; j < r.count; ++j) p[j] /= total;
        const float square = mix<W>(r.sources, p, r.count, offset, read.width, out + offset);
        finish<W>(read, square, mixed ? mixed + offset : nullptr, out + offset);
    }
}

struct Bank {
    const float* queries;
    int64_t count_queries, rows, width;
    float eps;
    DepthPartials partials;
};

template <int W>
INLINE void bank_rows_body(const Bank& b, const Rows& r, float* p) {
    for (int64_t row = r.first; row < r.last; ++row) {
        for (int64_t q = 0; q < b.count_queries; ++q) {
            float largest = -INFINITY, total = 0.0f, unused;
            for (int64_t j = 0; j < r.count; ++j)
                largest =
                    std::max(largest, p[j] = score<W>(b.queries + q * b.width, r.sources[j] + row * b.width, b.width, b.eps, &unused));
            for (int64_t j = 0; j < r.count; ++j) total += p[j] = std::exp(p[j] - largest);
            b.partials.largest[q * b.rows + row] = largest;
            b.partials.denominator[q * b.rows + row] = total;
            mix<W>(r.sources, p, r.count, row * b.width, b.width, b.partials.numerator + (q * b.rows + row) * b.width);
        }
    }
}

template <int W>
INLINE void merge_rows_body(const DepthRead& read, const DepthPartials& b, const Rows& r, float* mixed, float* out) {
    const float* sources[2] = {b.numerator, r.sources[0]};
    for (int64_t row = r.first; row < r.last; ++row) {
        float unused;
        const int64_t offset = row * read.width;
        const float live = score<W>(read.query, sources[1] + offset, read.width, read.eps, &unused);
        const float largest = std::max(live, b.largest[row]);
        const float kept = std::exp(b.largest[row] - largest), added = std::exp(live - largest);
        const float total = b.denominator[row] * kept + added;
        const float p[2] = {kept / total, added / total};
        const float square = mix<W>(sources, p, 2, offset, read.width, out + offset);
        finish<W>(read, square, mixed ? mixed + offset : nullptr, out + offset);
    }
}

DISPATCH(read_rows, (const DepthRead& read, const Rows& r, float* p, float* mixed, float* out), (read, r, p, mixed, out))
DISPATCH(bank_rows, (const Bank& b, const Rows& r, float* p), (b, r, p))
DISPATCH(merge_rows, (const DepthRead& read, const DepthPartials& b, const Rows& r, float* mixed, float* out), (read, b, r, mixed, out))

/* f(first, last) over all rows: at once where they are few, else in runs of about SMALL values. */
template <class F>
void in_runs(Pool& workers, int64_t rows, int64_t values_per_row, F&& f) {
    if (rows * values_per_row <= SMALL) {
        f(0, rows);
        return;
    }
    const int64_t run = std::max<int64_t>(1, SMALL / std::max<int64_t>(1, values_per_row)), runs = (rows + run - 1) / run;
    parallel(workers, runs, [&](int64_t i, int) { f(i * run, std::min(rows, (i + 1) * run)); });
}

}  // namespace

void depth_read_norm(Pool& workers, const DepthRead& read, const float* const* sources, int64_t count, int64_t rows, float* mixed,
                     float* out) {
    in_runs(workers, rows, count * read.width, [&](int64_t first, int64_t last) {
        std::vector<float> p(count);
        read_rows(read, {sources, count, first, last}, p.data(), mixed, out);
    });
}

void depth_bank(Pool& workers, const float* queries, int64_t count_queries, const float* const* bank, int64_t count, int64_t rows,
                int64_t width, float eps, const DepthPartials& partials) {
    in_runs(workers, rows, (count + count_queries) * width, [&](int64_t first, int64_t last) {
        std::vector<float> p(count);
        bank_rows({queries, count_queries, rows, width, eps, partials}, {bank, count, first, last}, p.data());
    });
}

void depth_merge_norm(Pool& workers, const DepthRead& read, const DepthPartials& partials, const float* live, int64_t rows, float* mixed,
                      float* out) {
    in_runs(workers, rows, 2 * read.width, [&](int64_t first, int64_t last) {
        merge_rows(read, partials, {&live, 1, first, last}, mixed, out);
    });
}

}  // namespace gnomon

extern "C" void gnomon_depth_read_norm(const float* const* sources, const float* query, const float* norm, int64_t count, int64_t rows,
                                       int64_t width, float eps, float* mixed, float* out, int32_t threads) {
    gnomon::depth_read_norm(gnomon::pool(threads), {query, norm, width, eps}, sources, count, rows, mixed, out);
}

extern "C" void gnomon_depth_bank(const float* const* bank, const float* queries, int64_t count_queries, int64_t count, int64_t rows,
                                  int64_t width, float eps, float* largest, float* denominator, float* numerator, int32_t threads) {
    gnomon::depth_bank(gnomon::pool(threads), queries, count_queries, bank, count, rows, width, eps, {largest, denominator, numerator});
}

extern "C" void gnomon_depth_merge_norm(const float* largest, const float* denominator, const float* numerator, const float* live,
                                        const float* query, const float* norm, int64_t rows, int64_t width, float eps, float* mixed,
                                        float* out, int32_t threads) {
    const gnomon::DepthPartials partials{const_cast<float*>(largest), const_cast<float*>(denominator), const_cast<float*>(numerator)};
    gnomon::depth_merge_norm(gnomon::pool(threads), {query, norm, width, eps}, partials, live, rows, mixed, out);
}

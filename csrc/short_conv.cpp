/* The short causal depth-wise convolution with SiLU. What each function computes stands in gnomon.h.
 *
 * A task owns a block of channels and walks all documents, so taps stay in the cache and their gradients need no reduction. It takes
 * STRETCH tokens at a time: their inputs and those before them are laid out in scratch as fp32, then one vector of channels after the other
 * walks them with its taps in registers. */
#include <algorithm>
#include <memory>

#include "elements.h"
#include "gnomon.h"
#include "lanes.h"

namespace {

constexpr int64_t BLOCK = 64;   /* channels of a task */
constexpr int64_t STRETCH = 32; /* tokens in scratch */
constexpr int64_t MOST_TAPS = 16;

/* Scratch of a task, each [rows, BLOCK]. */
struct Room {
    alignas(64) float weight[MOST_TAPS * BLOCK], d_weight[MOST_TAPS * BLOCK];
    alignas(64) float in[(STRETCH + MOST_TAPS) * BLOCK];  /* inputs; taps - 1 of them before the stretch */
    alignas(64) float pre[(STRETCH + MOST_TAPS) * BLOCK]; /* gradients of the sums; taps - 1 of them before the stretch */
    alignas(64) float out[STRETCH * BLOCK];
};

struct Conv {
    Input u, weight, history, d_y;
    Output y, d_u, d_weight, d_history;
    const int64_t* bounds;
    int64_t documents, channels, taps;
};

/* A block of channels. */
struct Part {
    int64_t first, width;
};

/* The inputs of document d from position p on, `count` of them: tokens, the history or nothing. */
void gather(const Conv& a, const Part& part, int64_t d, int64_t p, int64_t count, float* in) {
    const int64_t length = a.bounds[d + 1] - a.bounds[d];
    for (int64_t i = 0; i < count; ++i, ++p, in += BLOCK) {
        if (p >= 0 && p < length) a.u.row((a.bounds[d] + p) * a.channels + part.first, part.width, in);
        else if (p < 0 && a.history.data) a.history.row((d * (a.taps - 1) + a.taps - 1 + p) * a.channels + part.first, part.width, in);
        else std::fill(in, in + part.width, 0.0f);
    }
}

template <int W>
INLINE void load_taps(const Room& room, int64_t taps, int64_t i, vec<W>* w) {
    for (int64_t j = 0; j < taps; ++j) w[j] = load<W>(room.weight + j * BLOCK + i);
}

/* The sum of the taps that ends at token t of the stretch. */
template <int W>
INLINE vec<W> convolve(const Room& room, const vec<W>* w, int64_t taps, int64_t t, int64_t i) {
    vec<W> total = {};
    for (int64_t j = 0; j < taps; ++j) total += w[j] * load<W>(room.in + (t + j) * BLOCK + i);
    return total;
}

/* TAPS of them, or `any` where that is zero. */
template <int W, int TAPS>
INLINE void forward_stretch(Room& room, int64_t any, int64_t count) {
    const int64_t taps = TAPS ? TAPS : any;
    for (int64_t i = 0; i < BLOCK; i += W) {
        vec<W> w[TAPS ? TAPS : MOST_TAPS];
        load_taps<W>(room, taps, i, w);
        for (int64_t t = 0; t < count; ++t) {
            const vec<W> x = convolve<W>(room, w, taps, t, i);
            store<W>(room.out + t * BLOCK + i, x * sigmoid<W>(x));
        }
    }
}

/* The gradients of `count` sums, of which the document has `real`, and of the inputs whose last reader is one of them. */
template <int W, int TAPS>
INLINE void backward_stretch(Room& room, int64_t any, int64_t count, int64_t real) {
    const int64_t taps = TAPS ? TAPS : any;
    const vec<W> one = vec<W>{} + 1.0f;
    for (int64_t i = 0; i < BLOCK; i += W) {
        vec<W> w[TAPS ? TAPS : MOST_TAPS], d_w[TAPS ? TAPS : MOST_TAPS];
        load_taps<W>(room, taps, i, w);
        for (int64_t j = 0; j < taps; ++j) d_w[j] = load<W>(room.d_weight + j * BLOCK + i);
        for (int64_t t = 0; t < real; ++t) {
            const vec<W> x = convolve<W>(room, w, taps, t, i), s = sigmoid<W>(x);
            const vec<W> d_x = load<W>(room.out + t * BLOCK + i) * s * (one + x * (one - s));
            for (int64_t j = 0; j < taps; ++j) d_w[j] += d_x * load<W>(room.in + (t + j) * BLOCK + i);
            store<W>(room.pre + (t + taps - 1) * BLOCK + i, d_x);
        }
        for (int64_t t = std::max<int64_t>(real, 0); t < count; ++t) store<W>(room.pre + (t + taps - 1) * BLOCK + i, vec<W>{});
        for (int64_t j = 0; j < taps; ++j) store<W>(room.d_weight + j * BLOCK + i, d_w[j]);
        for (int64_t t = 0; t < count; ++t) {
            vec<W> total = {};
            for (int64_t j = 0; j < taps; ++j) total += w[j] * load<W>(room.pre + (t + taps - 1 - j) * BLOCK + i);
            store<W>(room.out + t * BLOCK + i, total);
        }
    }
}

template <int W>
INLINE void forward_body(Room& room, int64_t taps, int64_t count) {
    if (taps == 4) forward_stretch<W, 4>(room, taps, count);
    else forward_stretch<W, 0>(room, taps, count);
}
DISPATCH(forward, (Room& room, int64_t taps, int64_t count), (room, taps, count))

template <int W>
INLINE void backward_body(Room& room, int64_t taps, int64_t count, int64_t real) {
    if (taps == 4) backward_stretch<W, 4>(room, taps, count, real);
    else backward_stretch<W, 0>(room, taps, count, real);
}
DISPATCH(backward, (Room& room, int64_t taps, int64_t count, int64_t real), (room, taps, count, real))

void walk_forward(const Conv& a, const Part& part, Room& room) {
    for (int64_t d = 0; d < a.documents; ++d)
        for (int64_t t = 0, length = a.bounds[d + 1] - a.bounds[d]; t < length; t += STRETCH) {
            const int64_t count = std::min(STRETCH, length - t);
            gather(a, part, d, t - a.taps + 1, count + a.taps - 1, room.in);
            forward(room, a.taps, count);
            for (int64_t i = 0; i < count; ++i)
                a.y.row((a.bounds[d] + t + i) * a.channels + part.first, part.width, room.out + i * BLOCK);
        }
}

/* The gradient of input p is complete at token p + taps - 1: a document is walked taps - 1 tokens beyond its end, which have no sums. */
void walk_backward(const Conv& a, const Part& part, Room& room) {
    const int64_t before = a.taps - 1;
    for (int64_t d = 0; d < a.documents; ++d) {
        const int64_t length = a.bounds[d + 1] - a.bounds[d];
        std::fill_n(room.pre, before * BLOCK, 0.0f);
        for (int64_t t = 0; t < length + before; t += STRETCH) {
            const int64_t count = std::min(STRETCH, length + before - t), real = std::min(count, length - t);
            gather(a, part, d, t - before, count + before, room.in);
            for (int64_t i = 0; i < real; ++i)
                a.d_y.row((a.bounds[d] + t + i) * a.channels + part.first, part.width, room.out + i * BLOCK);
            backward(room, a.taps, count, real);
            for (int64_t i = 0; i < count; ++i) {
                const int64_t p = t + i - before;
                const float* row = room.out + i * BLOCK;
                if (p >= 0) a.d_u.row((a.bounds[d] + p) * a.channels + part.first, part.width, row);
                else a.d_history.row((d * before + t + i) * a.channels + part.first, part.width, row);
            }
            std::copy_n(room.pre + count * BLOCK, before * BLOCK, room.pre);
        }
    }
}

/* Channels beyond `width` are zero throughout. */
void begin(const Conv& a, const Part& part, Room& room) {
    std::memset(&room, 0, sizeof room);
    for (int64_t i = 0; i < part.width; ++i)
        for (int64_t j = 0; j < a.taps; ++j) room.weight[j * BLOCK + i] = a.weight.one((part.first + i) * a.taps + j);
}

template <class F>
void each_part(int threads, const Conv& a, F&& walk) {
#pragma omp parallel num_threads(threads)
    {
        const std::unique_ptr<Room> room(new Room);
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < a.channels; first += BLOCK) {
            const Part part{first, std::min(BLOCK, a.channels - first)};
            begin(a, part, *room);
            walk(part, *room);
        }
    }
}

bool bit(int32_t half, int place) { return (half >> place & 1) != 0; }

}  // namespace

extern "C" void gnomon_short_conv_forward(const void* u, const void* weight, const void* history, int32_t half, const int64_t* bounds,
                                          int64_t documents, int64_t channels, int64_t taps, void* y, int32_t threads) {
    Conv a{};
    a.u = {u, bit(half, 0)}, a.weight = {weight, bit(half, 1)}, a.history = {history, bit(half, 2)}, a.y = {y, bit(half, 0)};
    a.bounds = bounds, a.documents = documents, a.channels = channels, a.taps = taps;
    each_part(threads, a, [&](const Part& part, Room& room) { walk_forward(a, part, room); });
}

extern "C" void gnomon_short_conv_backward(const void* u, const void* weight, const void* history, const void* d_y, int32_t half,
                                           const int64_t* bounds, int64_t documents, int64_t channels, int64_t taps, void* d_u,
                                           void* d_weight, void* d_history, int32_t threads) {
    Conv a{};
    a.u = {u, bit(half, 0)}, a.weight = {weight, bit(half, 1)}, a.history = {history, bit(half, 2)}, a.d_y = {d_y, bit(half, 0)};
    a.d_u = {d_u, bit(half, 0)}, a.d_weight = {d_weight, bit(half, 1)}, a.d_history = {d_history, bit(half, 2)};
    a.bounds = bounds, a.documents = documents, a.channels = channels, a.taps = taps;
    each_part(threads, a, [&](const Part& part, Room& room) {
        walk_backward(a, part, room);
        float row[MOST_TAPS];
        for (int64_t i = 0; i < part.width; ++i) {
            for (int64_t j = 0; j < taps; ++j) row[j] = room.d_weight[j * BLOCK + i];
            a.d_weight.row((part.first + i) * taps, taps, row);
        }
    });
}

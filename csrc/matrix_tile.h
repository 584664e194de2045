/* The arithmetic of a packed product, written once over a set of instructions. A source file defines TARGET (the function attribute that
 * turns its instructions on) and a struct S, and includes this file inside an anonymous namespace.
 *
 * S has: LANES of a vector; ROWS, the most rows of one tile; columns(R), neighbouring vectors of outputs in a tile of R rows, and
 * code_columns(R), the same where MXFP4 is decoded in registers; CHUNK, blocks of MXFP4 that are decoded at once for many rows; Sum, a
 * vector of fp32; Input, how a rounded input is stored; Pair, weights of two inputs ready for products; Both, two inputs in all lanes; dot,
 * which takes from a sum of decoded weights the power of two they carry; BY_WORDS, whether codes are added by words, with a function of
 * its own (add_word), or pair by pair. A tile keeps R x C sums in registers and walks its inputs in order, so that an output is one chain
 * of additions, the same for every R and C.
 */

/* sums += pair by pair; `p` and `step` are the first row of pairs and the distance to the next. Weights from memory, or from the
 * scratch. */
template <class S, int R, int C, bool DECODED>
TARGET INLINE void add_pairs(const char* p, int64_t step, int64_t pairs, const typename S::Input* x, int64_t x_stride,
                             typename S::Sum (&sums)[R][C]) {
    for (int64_t i = 0; i < pairs; ++i, p += step, x += 2) {
        typename S::Pair w[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            w[c] = DECODED ? S::decoded(p + c * S::LANES * S::DECODED_BYTES) : S::pair(p + c * S::LANES * 4);
            if (!DECODED && R <= 2 && c % (16 / S::LANES) == 0) __builtin_prefetch(p + c * S::LANES * 4 + AHEAD);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const typename S::Both both = S::both(x + r * x_stride);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sums[r][c] = S::add_pair(sums[r][c], w[c], both);
        }
    }
}

/* sums += 32 inputs of one block of codes, 4 words per output; `p` and `step` as above, in words. */
template <class S, int R, int C>
TARGET INLINE void add_codes(const char* p, int64_t step, const typename S::Input* x, int64_t x_stride, typename S::Sum (&sums)[R][C]) {
    for (int word = 0; word < 4; ++word, p += step, x += 8) {
        if constexpr (S::BY_WORDS) {
            S::template add_word<R, C>(p, x, x_stride, sums);
            continue;
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            typename S::Pair w[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                w[c] = S::decode(p + c * S::LANES * 4, k);
                if (k == 0 && R <= 2 && c % (16 / S::LANES) == 0) __builtin_prefetch(p + c * S::LANES * 4 + AHEAD);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const typename S::Both both = S::both(x + r * x_stride + 2 * k);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) sums[r][c] = S::add_pair(sums[r][c], w[c], both);
            }
        }
    }
}

template <class S, int R, int C>
TARGET INLINE void clear(typename S::Sum (&sums)[R][C]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c] = S::zero();
}

template <class S, int R, int C>
TARGET INLINE void finish(const Tile& t, int64_t row, int64_t lane, typename S::Sum (&sums)[R][C]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const int64_t at = lane + c * S::LANES;
            if (at < t.out) S::write(t.y + (row + r) * t.y_stride + at, t.out - at, sums[r][c], t.add);
        }
    }
}

/* The tile of R rows and C vectors of outputs, by format. Each is a struct so that `over` can walk any of them. */
struct FP32 {
    template <class S>
    static constexpr int columns(int rows) { return S::columns(rows); }
    template <class S, int R, int C>
    TARGET static void INLINE run(const Tile& t, int64_t row, int64_t lane) {
        typename S::Sum sums[R][C];
        clear<S, R, C>(sums);
        const char* p = t.w + lane * 4;
        const float* x = static_cast<const float*>(t.x) + row * t.x_stride;
        for (int64_t i = 0; i < t.in; ++i, p += t.lanes * 4, ++x) {
            typename S::Sum w[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                w[c] = S::load(reinterpret_cast<const float*>(p) + c * S::LANES);
                if (R <= 2 && c % (16 / S::LANES) == 0) __builtin_prefetch(p + c * S::LANES * 4 + AHEAD);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) sums[r][c] = S::multiply_add(w[c], S::broadcast(x[r * t.x_stride]), sums[r][c]);
        }
        finish<S, R, C>(t, row, lane, sums);
    }
};

struct BFloat16 : FP32 {
    template <class S, int R, int C>
    TARGET static void INLINE run(const Tile& t, int64_t row, int64_t lane) {
        typename S::Sum sums[R][C];
        clear<S, R, C>(sums);
        const typename S::Input* x = static_cast<const typename S::Input*>(t.x) + row * t.x_stride;
        add_pairs<S, R, C, false>(t.w + lane * 4, t.lanes * 4, (t.in + 1) / 2, x, t.x_stride, sums);
        finish<S, R, C>(t, row, lane, sums);
    }
};

/* Codes become values in registers: for few rows. */
struct Codes {
    template <class S>
    static constexpr int columns(int rows) { return S::code_columns(rows); }
    template <class S, int R, int C>
    TARGET static void INLINE run(const Tile& t, int64_t row, int64_t lane) {
        typename S::Sum totals[R][C];
        clear<S, R, C>(totals);
        const typename S::Input* x = static_cast<const typename S::Input*>(t.x) + row * t.x_stride;
        for (int64_t block = 0; block < t.in / 32; ++block) {
            typename S::Sum dots[R][C];
            clear<S, R, C>(dots);
            add_codes<S, R, C>(t.w + (block * 4 * t.lanes + lane) * 4, t.lanes * 4, x + block * 32, t.x_stride, dots);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                const typename S::Sum scale = S::scale(t.scales + block * t.lanes + lane + c * S::LANES);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) totals[r][c] = S::multiply_add(scale, S::dot(dots[r][c]), totals[r][c]);
            }
        }
        finish<S, R, C>(t, row, lane, totals);
    }
};

/* Blocks [first, last) were decoded into the scratch, for many rows; the sums go from one chunk of blocks to the next in memory. */
struct Decoded : FP32 {
    template <class S, int R, int C>
    TARGET static void INLINE run(const Tile& t, int64_t row, int64_t lane) {
        const typename S::Input* x = static_cast<const typename S::Input*>(t.x) + row * t.x_stride + t.first * 32;
        const char* p = t.scratch + lane * S::DECODED_BYTES;
        float* totals = reinterpret_cast<float*>(t.scratch + S::CHUNK * 16 * GROUP * S::DECODED_BYTES) + row * GROUP + lane;
        for (int64_t block = t.first; block < t.last; ++block, x += 32, p += 16 * t.lanes * S::DECODED_BYTES) {
            typename S::Sum dots[R][C];
            clear<S, R, C>(dots);
            add_pairs<S, R, C, true>(p, t.lanes * S::DECODED_BYTES, 16, x, t.x_stride, dots);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                const typename S::Sum scale = S::scale(t.scales + block * t.lanes + lane + c * S::LANES);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    float* total = totals + r * GROUP + c * S::LANES;
                    const typename S::Sum before = block == 0 ? S::zero() : S::load(total);
                    S::write(total, S::LANES, S::multiply_add(scale, S::dot(dots[r][c]), before), false);
                }
            }
        }
        if (t.last < t.in / 32) return;
        typename S::Sum sums[R][C];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sums[r][c] = S::load(totals + r * GROUP + c * S::LANES);
        finish<S, R, C>(t, row, lane, sums);
    }
};

template <class S>
TARGET INLINE void decode_chunk(const Tile& t) {
    for (int64_t word = 0; word < (t.last - t.first) * 4; ++word)
        for (int64_t lane = 0; lane < t.lanes; lane += S::LANES)
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k)
                S::keep(t.scratch + ((word * 4 + k) * t.lanes + lane) * S::DECODED_BYTES,
                        S::decode(t.w + ((t.first * 4 + word) * t.lanes + lane) * 4, k));
}

/* R rows: all vectors of outputs, as many at once as the registers hold. */
template <class S, class F, int R>
TARGET INLINE void across(const Tile& t, int64_t row) {
    const int C = F::template columns<S>(R);
    int64_t lane = 0;
    for (; lane + C * S::LANES <= t.lanes; lane += C * S::LANES) F::template run<S, R, C>(t, row, lane);
    for (; lane < t.lanes; lane += S::LANES) F::template run<S, R, 1>(t, row, lane);
}

/* All rows, in tiles of nearly equal height. */
template <class S, class F>
TARGET void down(const Tile& t) {
    const int64_t tiles = (t.rows + S::ROWS - 1) / S::ROWS;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = i * t.rows / tiles;
        switch ((i + 1) * t.rows / tiles - row) {
            case 1: across<S, F, 1>(t, row); break;
            case 2: across<S, F, 2>(t, row); break;
            case 3: across<S, F, 3>(t, row); break;
            case 4: across<S, F, 4>(t, row); break;
            case 5: across<S, F, S::ROWS < 5 ? 1 : 5>(t, row); break;
            default: across<S, F, S::ROWS < 6 ? 1 : 6>(t, row); break;
        }
    }
}

template <class S>
TARGET void multiply_mxfp4(const Tile& t) {
    if (t.rows <= S::DIRECT_ROWS) return down<S, Codes>(t);
    Tile part = t;
    for (part.first = 0; part.first < t.in / 32; part.first = part.last) {
        part.last = part.first + S::CHUNK < t.in / 32 ? part.first + S::CHUNK : t.in / 32;
        decode_chunk<S>(part);
        down<S, Decoded>(part);
    }
}

template <class S>
TARGET void prepare(const float* x, int64_t in, void* to) {
    const int W = S::LANES;
    typename S::Input* out = static_cast<typename S::Input*>(to);
    int64_t i = 0;
    for (; i + W <= in; i += W) S::round(x + i, out + i);
    if (i == in) return;
    float last[W] = {};
    typename S::Input rounded[W];
    __builtin_memcpy(last, x + i, (in - i) * sizeof(float));
    S::round(last, rounded);
    __builtin_memcpy(out + i, rounded, (in - i + in % 2) * sizeof rounded[0]);
}

template <class S>
constexpr Kernels kernels() {
    return {sizeof(typename S::Input), S::CHUNK * 16 * GROUP * S::DECODED_BYTES + ROW_BLOCK * GROUP * 4, prepare<S>,
            {down<S, FP32>, down<S, BFloat16>, multiply_mxfp4<S>}};
}

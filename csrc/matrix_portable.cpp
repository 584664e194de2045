/* Packed products with the compiler's own vectors of four, for any processor. Products of bf16 values are exact in fp32, so a multiply and
 * an add give what a multiply-add does; only sums with fp32 weights may differ where the processor has none. */
#include "lanes.h"
#include "matrix_kernels.h"

#define TARGET

namespace gnomon {

namespace {

const float CODES[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct Set {
    typedef vec<4> Sum;
    typedef Lanes<4>::ints Bits;
    struct Pair { Sum even, odd; };
    typedef const float* Both;
    typedef float Input;
    static const int LANES = 4, ROWS = 4, DECODED_BYTES = 8, CHUNK = 8, DIRECT_ROWS = 2;
    static const bool BY_WORDS = false;
    static constexpr int columns(int rows) { return rows <= 2 ? 4 : 2; }
    static constexpr int code_columns(int rows) { return rows <= 2 ? 4 : 2; }

    static INLINE Sum zero() { return Sum{}; }
    static INLINE Sum load(const float* p) { return ::load<4>(p); }
    static INLINE Sum broadcast(float x) { return Sum{} + x; }
    static INLINE Sum multiply_add(Sum a, Sum b, Sum c) { return a * b + c; }
    static INLINE Sum of_bits(Bits bits) {
        Sum x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }
    static INLINE Bits bits(const void* p) {
        Bits x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static INLINE Pair pair(const char* p) {
        const Bits both = bits(p);
        return {of_bits(both << 16), of_bits(both & static_cast<int32_t>(0xffff0000))};
    }
    static INLINE Pair decoded(const char* p) {
        return {::load<4>(reinterpret_cast<const float*>(p)), ::load<4>(reinterpret_cast<const float*>(p) + 4)};
    }
    static INLINE void keep(char* p, Pair w) {
        ::store<4>(reinterpret_cast<float*>(p), w.even);
        ::store<4>(reinterpret_cast<float*>(p) + 4, w.odd);
    }
    static INLINE Sum value(Bits words) {
        return Sum{CODES[words[0] & 15], CODES[words[1] & 15], CODES[words[2] & 15], CODES[words[3] & 15]};
    }
    static INLINE Pair decode(const char* p, int k) {
        const Bits words = bits(p);
        return {value(words >> (4 * k)), value(words >> (16 + 4 * k))};
    }
    static INLINE Sum dot(Sum sum) { return sum; }
    static INLINE Both both(const Input* x) { return x; }
    static INLINE Sum add_pair(Sum sum, Pair w, Both x) { return w.even * x[0] + (w.odd * x[1] + sum); }
    static INLINE Sum scale(const uint8_t* p) {
        Bits of;
        for (int i = 0; i < 4; ++i) of[i] = p[i] == 255 ? 0x7fc00000 : p[i] ? p[i] << 23 : 0x00400000;
        return of_bits(of);
    }
    static INLINE void write(float* y, int64_t count, Sum sum, bool add) {
        if (count > 4) count = 4;
        if (add) sum = load_some<4>(y, count) + sum;
        store_some<4>(y, count, sum);
    }
    static INLINE void round(const float* x, Input* to) {
        for (int i = 0; i < 4; ++i) {
            uint32_t b;
            std::memcpy(&b, x + i, sizeof b);
            b = (b & 0x7fffffff) > 0x7f800000 ? b | 0x00400000 : b + 0x7fff + (b >> 16 & 1);
            b &= 0xffff0000;
            std::memcpy(to + i, &b, sizeof b);
        }
    }
};

#include "matrix_tile.h"

}  // namespace

const Kernels kernels_portable = kernels<Set>();

}  // namespace gnomon

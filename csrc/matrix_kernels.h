/* What every set of instructions offers for packed products (csrc/matrix_tile.h), and the shape of one piece of work. */
#pragma once

#include <cstdint>

namespace gnomon {

const int64_t GROUP = 64;   /* outputs whose weights stand interleaved: one stream of memory */
const int64_t AHEAD = 4096; /* bytes from a weight that is used to one that is asked for, where memory sets the pace */
const int64_t ROW_BLOCK = 96; /* rows of one piece: their inputs and sums stay in the second-level cache */

/* One group of outputs for at most ROW_BLOCK rows. `lanes` is the group's width in memory, of which `out` are outputs. */
struct Tile {
    const char* w;
    const uint8_t* scales;
    int64_t lanes, out, in;
    const void* x; /* prepared inputs; fp32 rows as they are for fp32 weights */
    int64_t rows, x_stride;
    float* y;
    int64_t y_stride;
    bool add;
    char* scratch;       /* `scratch_bytes` of the set, 64-byte aligned */
    int64_t first, last; /* blocks of MXFP4 that stand decoded in the scratch; set inside */
};

struct Kernels {
    int64_t input_bytes; /* of one prepared input */
    int64_t scratch_bytes;
    /* Rounds `in` fp32 values to bf16, followed by a zero where `in` is odd. */
    void (*prepare)(const float* x, int64_t in, void* to);
    void (*multiply[3])(const Tile& t); /* by format of the weights */
};

#if defined(__x86_64__) && defined(__GNUC__)
extern const Kernels kernels_v4_bf16, kernels_v4, kernels_v3;
#endif
extern const Kernels kernels_portable;

}  // namespace gnomon

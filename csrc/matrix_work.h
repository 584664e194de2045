/* Pieces of packed products that the products themselves and the routed experts share. */
#pragma once

#include "matrix.h"
#include "matrix_kernels.h"

namespace gnomon {

/* The set of instructions that products use in this process. */
const Kernels& kernels();

/* Bytes of the weights of one full group of outputs. */
int64_t group_bytes(const Matrix& w);

/* Memory that a thread keeps from call to call; it grows and is never read before it is written. */
struct Scratch {
    char* memory = nullptr;
    int64_t size = 0;
    char* get(int64_t bytes);
    ~Scratch();
};
enum Use { TILE, INPUTS, GATHERED, BRANCHES, HIDDEN, OUTPUTS, COARSE, USES };
Scratch& scratch(Use use);

/* The same rows as they came and as products of bf16 read them; strides in elements. */
struct Inputs {
    const float* plain;
    int64_t plain_stride;
    const void* rounded;
    int64_t rounded_stride;
    Inputs from(int64_t row) const;
};
int64_t rounded_stride(int64_t in);
void round_rows(const float* x, int64_t rows, int64_t stride, int64_t in, char* to);
Inputs prepare(Pool& pool, const float* x, int64_t rows, int64_t stride, int64_t in, bool round, Scratch& room);

/* Groups [first, last) of W x for at most ROW_BLOCK rows, on the calling thread; y begins at the first of their outputs. */
void multiply_groups(const Matrix& w, int64_t first, int64_t last, const Inputs& x, int64_t rows, float* y, int64_t y_stride, bool add);

}  // namespace gnomon

/* SiTU-GLU on one thread, for operators that apply it to a tile while it is in cache. The functions of gnomon.h say what they compute. */
#pragma once

#include <cstdint>

namespace gnomon {

/* out = situ(gate, up), `count` values each; a beta of 0 leaves its branch uncapped. */
void situ(const float* gate, const float* up, int64_t count, float beta1, float beta2, float* out);

/* Gradients of weight[row] situ(gate, up) from `grad` of that product; `weight` (or NULL for ones) and `d_weight` (or NULL) are [rows],
 * the others [rows, width]; `weighted` (or NULL) receives weight situ(gate, up). */
struct SituGradient {
    const float *grad, *gate, *up, *weight;
    float *d_gate, *d_up, *weighted, *d_weight;
    int64_t rows, width;
    float beta1, beta2;
};
void situ_backward(const SituGradient& gradient);

}  // namespace gnomon

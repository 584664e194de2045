/* Operators of a training step, part of gnomon.h: the same rules hold for their arrays and for `threads`. */
#ifndef GNOMON_TRAINING_H
#define GNOMON_TRAINING_H

/* Linear maps without bias that share their input: y_i = x W_i' with x [rows, in], W_i [outs_i, in], y_i [rows, outs_i], for `count` maps.
 * The gradient of x is the sum over the maps of d_y_i W_i; that of W_i is d_y_i' x. */
GNOMON_API void gnomon_linear_forward(const float* x, int64_t rows, int64_t in, const float* const* weights, const int64_t* outs,
                                      int64_t count, float* const* y, int32_t threads);
GNOMON_API void gnomon_linear_backward_input(const float* const* d_y, int64_t rows, int64_t in, const float* const* weights,
                                             const int64_t* outs, int64_t count, float* d_x, int32_t threads);
GNOMON_API void gnomon_linear_backward_weights(const float* x, const float* const* d_y, int64_t rows, int64_t in, const int64_t* outs,
                                               int64_t count, float* const* d_weights, int32_t threads);

#endif

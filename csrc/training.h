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

/* Pairs (token, slot) sorted by expert, stable: ids [pairs]; starts [experts + 1] bounds each expert's pairs; order [pairs] is the pair at
 * each sorted place and position [pairs] its inverse. range receives the smallest and largest id; where one names no expert, nothing else
 * is written. */
GNOMON_API void gnomon_group(const int64_t* ids, int64_t pairs, int64_t experts, int64_t* range, int64_t* starts, int64_t* order,
                             int64_t* position);

/* Routed experts over sorted pairs: y[n] = sum_j weights[n][j] W_down situ(W_gate z[n], W_up z[n]) with the stacks of the expert of (n, j).
 *   z, y [tokens, latent]; weights [tokens, k]; w_gate, w_up [experts, inner, latent]; w_down [experts, latent, inner];
 *   gate, up [tokens k, inner] receive the pre-activations in sorted order, for the backward pass.
 *   With mxfp8 both products of an expert read MXFP8: z must be rounded already, the intermediate is rounded here (rule `even`). */
GNOMON_API void gnomon_grouped_forward(const float* z, const float* w_gate, const float* w_up, const float* w_down, const float* weights,
                                       const int64_t* starts, const int64_t* order, const int64_t* position, int64_t tokens, int64_t k,
                                       int64_t experts, int64_t latent, int64_t inner, float beta1, float beta2, float* gate, float* up,
                                       float* y, int32_t mxfp8, int32_t threads);

/* Its gradients from `grad` [tokens, latent] of y; those of an expert without pairs are zero. With mxfp8 they go straight through the
 * rounding; that of a routing weight is <W_down' dy, a> with the rounded a. */
GNOMON_API void gnomon_grouped_backward(const float* z, const float* grad, const float* w_gate, const float* w_up, const float* w_down,
                                        const float* weights, const float* gate, const float* up, const int64_t* starts,
                                        const int64_t* order, const int64_t* position, int64_t tokens, int64_t k, int64_t experts,
                                        int64_t latent, int64_t inner, float beta1, float beta2, float* d_z, float* d_gate, float* d_up,
                                        float* d_down, float* d_weights, int32_t mxfp8, int32_t threads);

/* Newton-Schulz: `steps` steps X <- a X + (b G + c G^2) X with G = X X' from X = gradient / (|gradient|_F + 1e-7), for each of `count`
 * matrices [rows, columns]; coefficients are a, b, c. */
GNOMON_API void gnomon_newton_schulz(const float* gradient, int64_t count, int64_t rows, int64_t columns, int64_t steps,
                                     const float* coefficients, float* out, int32_t threads);

/* Cross-entropy of logits hidden weight' against targets, row by row: losses [rows] in nats (fp64). hidden [rows, width]; weight
 * [words, width]; targets [rows] in 0..words-1. d_hidden and d_weight receive the gradients of the losses' sum (each may be NULL). About a
 * million logits exist at a time, or those of 192 rows where these are more. */
GNOMON_API void gnomon_cross_entropy(const float* hidden, const float* weight, const int64_t* targets, int64_t rows, int64_t width,
                                     int64_t words, double* losses, float* d_hidden, float* d_weight, int32_t threads);

/* The choice of experts from scores [rows, experts] and the selection bias [experts], as csrc/router.h describes it: ids, weights
 * [rows, k]; cutoff [rows] is the (k+1)-th largest biased score, or the smallest chosen where there is none. */
GNOMON_API void gnomon_route_forward(const float* scores, const float* bias, int64_t rows, int64_t experts, int64_t k, int64_t groups,
                                     int64_t kept_groups, int32_t renormalise, float scaling, int64_t* ids, float* weights, float* cutoff,
                                     int32_t threads);

/* The gradient of the scores from that of the weights. */
GNOMON_API void gnomon_route_backward(const float* scores, const int64_t* ids, const float* d_weights, int64_t rows, int64_t experts,
                                      int64_t k, int32_t renormalise, float scaling, float* d_scores, int32_t threads);

/* How many rows (of those where mask [rows] is not zero; NULL: all) have (cutoff - score - lowest) / width in each of `bins` bins, values
 * outside in the first and last: histogram [experts, bins]. */
GNOMON_API void gnomon_required_bias_histogram(const float* scores, const float* cutoff, const uint8_t* mask, int64_t rows, int64_t experts,
                                               int64_t bins, double lowest, double width, int64_t* histogram, int32_t threads);

#endif

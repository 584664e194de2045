/* gnomon's operators in C++: plain pointers in, plain pointers out, no torch and no Python.
 *
 * Every array is fp32 unless said, C-contiguous and owned by the caller. Outputs are written completely and never read first. No function
 * keeps anything but scratch memory between calls; all may be called from several threads. `threads` bounds the threads of one call.
 * Legend: N tokens of all documents, S documents, H heads, K key channels, V value channels.
 * Document s is tokens bounds[s] to bounds[s + 1] (exclusive); it may be empty.
 */
#ifndef GNOMON_H
#define GNOMON_H

#include <stdint.h>

#define GNOMON_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever a signature below does; the Python side refuses another number. */
#define GNOMON_ABI 7
GNOMON_API int32_t gnomon_abi(void);

/* Which instruction set the kernels run with here: "x86-64-v4 with AVX512-BF16", "x86-64-v4", "x86-64-v3" or "portable". */
GNOMON_API const char* gnomon_instruction_set(void);

/* Kimi Delta Attention over documents, token by token:
 *     S <- Diag(exp g) S;  e = v - S'k;  S <- S + beta k e';  o = S'q
 *   q, k, g [N, H, K]; v, o [N, H, V]; beta [N, H]; initial (or NULL for zero), last [S, H, K, V].
 *   q, k, v, g, beta are fp32, or bf16 where bit 0, 1, 2, 3, 4 of `half` is set; all else is fp32.
 * For the backward pass, both or neither of:
 *   error [N, H, V] receives e; states [sum over documents of ceil(length / period), H, K, V] receives the state before every
 *   `period`-th token of each document. */
GNOMON_API void gnomon_kda_forward(const void* q, const void* k, const void* v, const void* g, const void* beta, int32_t half,
                                   const float* initial, const int64_t* bounds, int64_t documents, int64_t heads, int64_t keys,
                                   int64_t values, int64_t period, float* o, float* last, float* error, float* states, int32_t threads);

/* Gradients (fp32) of gnomon_kda_forward from those of o and of last (or NULL for zero), with the error and states that it wrote.
 * Bits 0 to 3 of `half` say which of q, k, g, beta are bf16. */
GNOMON_API void gnomon_kda_backward(const void* q, const void* k, const void* g, const void* beta, int32_t half, const float* error,
                                    const float* states, const float* d_o, const float* d_last, const int64_t* bounds, int64_t documents,
                                    int64_t heads, int64_t keys, int64_t values, int64_t period, float* d_q, float* d_k, float* d_v,
                                    float* d_g, float* d_beta, float* d_initial, int32_t threads);

/* One token of `rows` independent sequences: q, k, g [rows, K]; v, o [rows, V]; beta [rows]; state, next [rows, K, V]. `next` may not
 * overlap `state`. */
GNOMON_API void gnomon_kda_step(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* state,
                     int64_t rows, int64_t keys, int64_t values, float* o, float* next, int32_t threads);

/* The KDA layer of an inference engine between its projections (csrc/kda.h): outputs of the new tokens of each sequence, and with
 * `commit` its states advanced. C = 3 heads width.
 *   conv_weight [taps, C]; a_log [heads]; dt_bias [heads, width]; norm [width]; lower_bound < 0, or 0 for the softplus form;
 *   projected [N, C]; decay, gate, out [N, heads, width]; beta [N, heads]; conv [slots, taps - 1, C]; matrix [slots, heads, width, width];
 *   slots [sequences]; copies_at [copies, 3]: (sequence, tokens, slot of copies_conv and copies_matrix), sorted by the first two;
 *   inputs (or NULL) [N, 4 heads width + heads] receives what gnomon_kda_commit needs to advance by a prefix of each sequence. */
GNOMON_API void gnomon_kda_decode(const float* conv_weight, const float* a_log, const float* dt_bias, const float* norm, float lower_bound,
                                  float eps, int64_t heads, int64_t width, int64_t taps, const int64_t* bounds, int64_t sequences,
                                  const float* projected, const float* decay, const float* beta, const float* gate, float* conv,
                                  float* matrix, const int64_t* slots, int32_t commit, const int64_t* copies_at, int64_t copies,
                                  float* copies_conv, float* copies_matrix, float* inputs, float* out, int32_t threads);
GNOMON_API void gnomon_kda_commit(const float* conv_weight, const float* a_log, const float* dt_bias, float lower_bound, int64_t heads,
                                  int64_t width, int64_t taps, const float* inputs, const int64_t* bounds, int64_t sequences,
                                  const int64_t* prefix, float* conv, float* matrix, const int64_t* slots, int32_t threads);

/* Rows of unit length: y = scale x / sqrt(sum x^2 + eps), x and y [rows, width]; and the gradient of x from that of y. With `half`, x and
 * d_x are bf16. */
GNOMON_API void gnomon_unit_forward(const void* x, int32_t half, int64_t rows, int64_t width, float eps, float scale, float* y,
                                    int32_t threads);
GNOMON_API void gnomon_unit_backward(const void* x, const float* d_y, int32_t half, int64_t rows, int64_t width, float eps, float scale,
                                     void* d_x, int32_t threads);

/* Root mean square norm, gated or not (gate NULL): y = x / sqrt(mean x^2 + eps) * weight * sigmoid(gate); x, gate, y [rows, width],
 * weight [width]. Bits 0 to 3 of `half` say which of x, weight, gate, y are bf16, and so are the gradients of x, gate and y; without a gate
 * the norm of a bf16 x is rounded before the weight multiplies. d_gate is NULL where gate is. */
GNOMON_API void gnomon_rms_forward(const void* x, const void* weight, const void* gate, int32_t half, int64_t rows, int64_t width,
                                   float eps, void* y, int32_t threads);
GNOMON_API void gnomon_rms_backward(const void* x, const void* weight, const void* gate, const void* d_y, int32_t half, int64_t rows,
                                    int64_t width, float eps, void* d_x, float* d_weight, void* d_gate, int32_t threads);

/* The log decay of a channel: g = lower_bound sigmoid(exp(a_log) (z + bias)); z, g [rows, heads, width], bias [heads, width] or NULL,
 * a_log [heads], lower_bound below zero. The gradients come from that of g and from g; d_z, d_bias and d_a_log are written. */
GNOMON_API void gnomon_decay_forward(const float* z, const float* bias, const float* a_log, float lower_bound, int64_t rows, int64_t heads,
                                     int64_t width, float* g, int32_t threads);
GNOMON_API void gnomon_decay_backward(const float* z, const float* bias, const float* a_log, const float* g, const float* d_g,
                                      float lower_bound, int64_t rows, int64_t heads, int64_t width, float* d_z, float* d_bias,
                                      float* d_a_log, int32_t threads);

/* Causal depth-wise convolution over documents, then SiLU: y_t = silu(sum_j weight[:, j] u_(t - taps + 1 + j)).
 *   u, y [N, channels]; weight [channels, taps], at most 16 taps; history (or NULL for zeros) [S, taps - 1, channels] stands before each
 *   document. Bits 0, 1, 2 of `half` say whether u and y, weight, history are bf16; so are their gradients.
 * The backward pass writes the gradient of the history always. */
GNOMON_API void gnomon_short_conv_forward(const void* u, const void* weight, const void* history, int32_t half, const int64_t* bounds,
                                          int64_t documents, int64_t channels, int64_t taps, void* y, int32_t threads);
GNOMON_API void gnomon_short_conv_backward(const void* u, const void* weight, const void* history, const void* d_y, int32_t half,
                                           const int64_t* bounds, int64_t documents, int64_t channels, int64_t taps, void* d_u,
                                           void* d_weight, void* d_history, int32_t threads);

/* SiTU-GLU: out = beta1 tanh(gate/beta1) sigmoid(gate) beta2 tanh(up/beta2), all [rows, width]; a beta of 0 leaves its branch uncapped. */
GNOMON_API void gnomon_situ_forward(const float* gate, const float* up, int64_t rows, int64_t width, float beta1, float beta2, float* out,
                        int32_t threads);

/* Gradients of weight[row] * out (weight [rows], or NULL for ones) from `grad` of that product: d_gate, d_up [rows, width];
 * weighted [rows, width] receives weight * out and d_weight [rows] the inner product of grad and out (each may be NULL). */
GNOMON_API void gnomon_situ_backward(const float* grad, const float* gate, const float* up, const float* weight, int64_t rows,
                         int64_t width, float beta1, float beta2, float* d_gate, float* d_up, float* weighted, float* d_weight,
                         int32_t threads);

/* The depth read: out = sum_j p_j v_j with p = softmax_j(score_j), score_j = r_j <query, v_j>, r_j = 1 / sqrt(mean v_j^2 + eps).
 * sources: `count` arrays [tokens, width]; query [width]; inverse_rms (r) and scores [count, tokens] are written for the backward pass. */
GNOMON_API void gnomon_depth_forward(const float* const* sources, const float* query, int64_t count, int64_t tokens, int64_t width,
                         float eps, float* inverse_rms, float* scores, float* out, int32_t threads);

/* Gradients from that of out, grad [tokens, width]: d_sources, `count` arrays [tokens, width] (NULL where not wanted); d_query [width]. */
GNOMON_API void gnomon_depth_backward(const float* const* sources, const float* query, const float* inverse_rms, const float* scores,
                          const float* grad, int64_t count, int64_t tokens, int64_t width, float* const* d_sources, float* d_query,
                          int32_t threads);

/* MX formats (bits 4: MXFP4, two codes per byte; 8: MXFP8, E4M3) of `blocks` blocks of 32 values with one scale byte each. `ceil` picks the
 * smallest scale that saturates nothing instead of the rounded one. `round` is decode(encode(x)) in one pass. */
GNOMON_API void gnomon_mxfp_encode(const float* x, int64_t blocks, int32_t bits, int32_t ceil, uint8_t* codes, uint8_t* scales,
                         int32_t threads);
GNOMON_API void gnomon_mxfp_decode(const uint8_t* codes, const uint8_t* scales, int64_t blocks, int32_t bits, float* x, int32_t threads);
GNOMON_API void gnomon_mxfp_round(const float* x, int64_t blocks, int32_t bits, int32_t ceil, float* rounded, int32_t threads);

/* Packed weight matrices for inference; csrc/matrix.h says how they stand in memory and in which order a product is summed. */
typedef struct gnomon_matrix {
    const void* data;      /* gnomon_matrix_bytes of it; for the fast paths 64-byte aligned */
    const uint8_t* scales; /* MXFP4 only */
    int64_t out, in;
    int32_t format; /* 0 fp32, 1 bf16, 2 MXFP4 */
} gnomon_matrix;

typedef struct gnomon_experts {
    const gnomon_matrix *gate, *up, *down; /* `count` of each: gate, up [inner, latent], down [latent, inner] */
    int64_t count;
    float beta1, beta2; /* the two caps of SiTU; 0 for none */
} gnomon_experts;

/* `bytes` of zeros in anonymous memory with huge pages where the system has them; *address is NULL when there is no memory. */
GNOMON_API void gnomon_buffer_allocate(int64_t bytes, void** address);
GNOMON_API void gnomon_buffer_free(void* address, int64_t bytes);

/* Reads a buffer once, as fast as `threads` can, and takes the exclusive or of its 8-byte words: the yardstick for
 * products that are bound by memory. */
GNOMON_API void gnomon_buffer_read(const void* address, int64_t bytes, uint64_t* parity, int32_t threads);

/* Bytes of `data` and of `scales` that a packed matrix of this shape and format needs. */
GNOMON_API void gnomon_matrix_bytes(int64_t out, int64_t in, int32_t format, int64_t* data, int64_t* scales);

/* Packs W [out, in] into w->data and w->scales. Sources by format of w: for fp32, fp32; for bf16, bf16 bits; for MXFP4, codes
 * [out, in / 2] (low nibble first) with `scales` [out, in / 32]. `unpack` writes the values that w stands for, [out, in] fp32. */
GNOMON_API void gnomon_matrix_pack(const void* source, const uint8_t* scales, const gnomon_matrix* w, int32_t threads);
GNOMON_API void gnomon_matrix_unpack(const gnomon_matrix* w, float* values, int32_t threads);

/* y = W x per row (plus y when `add`): x [rows, in] and y [rows, out] with rows `x_stride` and `y_stride` floats apart. Inputs of bf16 and
 * MXFP4 weights are rounded to bf16. A row's result does not depend on the other rows or on `threads`. */
GNOMON_API void gnomon_matrix_multiply(const gnomon_matrix* w, const float* x, int64_t rows, int64_t x_stride, float* y, int64_t y_stride,
                                       int32_t add, int32_t threads);

/* Routed experts: y[r] = sum_j weights[r][j] down(situ(gate z[r], up z[r])) of expert ids[r][j]; z, y [rows, latent], ids, weights
 * [rows, k]. `mxfp8` rounds z and the intermediate to MXFP8 before they are multiplied. *refused is the position of the first id that
 * names no expert, and y is not written then; -1 otherwise. */
GNOMON_API void gnomon_experts_forward(const gnomon_experts* experts, const float* z, const int32_t* ids, const float* weights,
                                       int64_t rows, int64_t k, int32_t mxfp8, float* y, int64_t* refused, int32_t threads);

/* The depth read for inference (depth.h), followed by the RMSNorm of weight norm [width] unless that is NULL; mixed may be NULL. */
GNOMON_API void gnomon_depth_read_norm(const float* const* sources, const float* query, const float* norm, int64_t count, int64_t rows,
                            int64_t width, float eps, float* mixed, float* out, int32_t threads);

/* Its two phases: queries [count_queries, width] against the bank; then the live sum for one query, from that query's partials. */
GNOMON_API void gnomon_depth_bank(const float* const* bank, const float* queries, int64_t count_queries, int64_t count, int64_t rows,
                       int64_t width, float eps, float* largest, float* denominator, float* numerator, int32_t threads);
GNOMON_API void gnomon_depth_merge_norm(const float* largest, const float* denominator, const float* numerator, const float* live,
                             const float* query, const float* norm, int64_t rows, int64_t width, float eps, float* mixed, float* out,
                             int32_t threads);

/* Latent attention over pages (attention.h): q [N, heads, nope + rope], pages [P, page_tokens, latent + rope], kv_b
 * [heads, nope + value, latent], table [S, table_width], past [S], bounds [S + 1], out [N, heads, value]. Formats: 0 fp32, 1 bf16;
 * page_format and weight_format are those of the arrays, `format` that of the products' operands. */
GNOMON_API void gnomon_latent_attention(const float* q, const void* pages, int32_t page_format, int64_t page_tokens, const void* kv_b,
                             int32_t weight_format, int32_t format, const int32_t* table, int64_t table_width, const int64_t* past,
                             const int64_t* bounds, int64_t sequences, int64_t heads, int64_t nope, int64_t rope, int64_t value,
                             int64_t latent, float scale, float* out, int32_t threads);

/* A whole model for inference; csrc/layer.h has the structures `model`, `pools` and `rows` (gnomon::Model, Pools, Rows) field by field.
 * `sizes` receives what sizeof says of Layer, Model, Pools and Rows, for the other side to compare. */
GNOMON_API void gnomon_model_sizes(int64_t* sizes);

/* Bytes of scratch memory that gnomon_model_forward needs for these rows, `total` of them: bounded, however long a sequence is.
 * Attention takes memory of its own while it runs, for the partial results of each span of keys. */
GNOMON_API void gnomon_model_arena(const void* model, const void* rows, int64_t total, int64_t* bytes);

/* Rows of any number of sequences through all layers: states in `pools` are read and advanced, hidden [wanted, D] receives what the head
 * sees of the wanted rows, logits [wanted, vocabulary] (or NULL) what it says. A row's result depends on its own sequence alone. */
GNOMON_API void gnomon_model_forward(const void* model, const void* pools, const void* rows, float* hidden, float* logits, void* arena,
                                     int32_t threads);

/* Advances the KDA states of held sequences by their first prefix[s] tokens, of which a call before wrote the record; sequence s is the
 * record's rows bounds[s] to bounds[s + 1]. */
GNOMON_API void gnomon_model_advance(const void* model, const void* pools, const float* record, const int64_t* bounds,
                                     const int64_t* prefix, const int64_t* slots, int64_t sequences, int32_t threads);

/* Bytes of kv_b [heads, nope + value, latent] as latent attention reads it, and kv_b (fp32, or bf16 bits for format 1) brought into that
 * form. `shape` is gnomon::LatentShape, `weights` gnomon::LatentWeights (csrc/attention.h). */
GNOMON_API void gnomon_latent_weights_bytes(const void* shape, int32_t format, int64_t* bytes);
GNOMON_API void gnomon_latent_weights_pack(const void* shape, const void* kv_b, const void* weights);

#include "training.h"

#ifdef __cplusplus
}
#endif
#endif

/* Latent attention over pages: the inference side of MLA (report section 2.1), for any number of sequences at once.
 *
 * A cached token is one row [latent | shared key]; heads differ only in kv_b, which is linear. So there are two exact forms:
 *   absorbed: the query takes over the key half of kv_b, attends to the rows themselves, and the value half acts on the result;
 *   expanded: a block of rows is turned into keys and values of a head once, and all new tokens of the sequence attend to those.
 * The second needs 640 instead of 2,176 operations per head, token and key (K3's widths) but has to expand each key first; a sequence's
 * own numbers of new and past tokens decide, so a row's result never depends on what else is in the batch, or on threads. Where it must
 * not depend on how many tokens come at once either, `absorbed` keeps to the first.
 */
#pragma once

#include <cstdint>

#include "matrix.h"
#include "pool.h"

namespace gnomon {

struct LatentShape {
    int64_t heads, nope, rope, value, latent; /* widths: a query is [nope | rope], a row [latent | rope] */
    float scale;
    int32_t absorbed = 0; /* absorbed always: results then have the same bits however a sequence is cut into calls */
};

/* kv_b [heads, nope + value, latent] as the kernels read it. With BF16 all products take bf16 operands and sum in fp32. */
struct LatentWeights {
    const void* packed;
    int32_t format; /* F32 or BF16 */
};
int64_t latent_weights_bytes(const LatentShape&, int32_t format);
void pack_latent_weights(const LatentShape&, const void* kv_b, int32_t source_format, int32_t format, void* packed);

/* One layer's cache: rows [pages, page_tokens, latent + rope] of F32 or BF16; page p begins page_rows rows after page p - 1 (pages of other
 * layers may lie between). */
struct LatentPages {
    void* rows;
    int64_t page_tokens, page_rows;
    int32_t format;
};

/* Sequence s brings rows bounds[s] to bounds[s + 1] of the stream and has past[s] rows in the cache before them; its position p stands
 * in page table[s * table_width + p / page_tokens]. */
struct LatentBatch {
    int64_t sequences, table_width;
    const int32_t* table;
    const int64_t *past, *bounds;
};

/* Write the new rows [N, latent + rope] (fp32, rows `stride` apart) into the pages. */
void append_latents(const LatentShape&, const LatentPages&, const LatentBatch&, const float* rows, int64_t stride);

/* out [N, heads, value] from q [N, heads, nope + rope]; a token sees the past of its sequence and the new tokens up to itself, all of
 * which stand in the pages already. */
void latent_attention(Pool&, const LatentShape&, const LatentWeights&, const LatentPages&, const LatentBatch&, const float* q, float* out);

}  // namespace gnomon

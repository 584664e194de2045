/* Latent attention over pages; attention.h says what each function computes. */
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gnomon.h"

namespace gnomon {
namespace {

float widen(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float element(const void* values, int32_t format, int64_t i) {
    return format == BF16 ? widen(static_cast<const uint16_t*>(values)[i]) : static_cast<const float*>(values)[i];
}

int64_t place(const LatentBatch& b, const LatentPages& pages, int64_t sequence, int64_t position) {
    return b.table[sequence * b.table_width + position / pages.page_tokens] * pages.page_rows + position % pages.page_tokens;
}

}  // namespace

int64_t latent_weights_bytes(const LatentShape& s, int32_t) {
    return s.heads * (s.nope + s.value) * s.latent * static_cast<int64_t>(sizeof(float));
}

void pack_latent_weights(const LatentShape& s, const void* kv_b, int32_t source_format, int32_t, void* packed) {
    for (int64_t i = 0; i < s.heads * (s.nope + s.value) * s.latent; ++i)
        static_cast<float*>(packed)[i] = element(kv_b, source_format, i);
}

void append_latents(const LatentShape& s, const LatentPages& pages, const LatentBatch& b, const float* rows, int64_t stride) {
    const int64_t width = s.latent + s.rope;
    for (int64_t sequence = 0; sequence < b.sequences; ++sequence) {
        for (int64_t t = b.bounds[sequence]; t < b.bounds[sequence + 1]; ++t) {
            const int64_t row = place(b, pages, sequence, b.past[sequence] + t - b.bounds[sequence]);
            if (pages.format == F32) std::memcpy(static_cast<float*>(pages.rows) + row * width, rows + t * stride, width * sizeof(float));
            else for (int64_t i = 0; i < width; ++i) static_cast<uint16_t*>(pages.rows)[row * width + i] = narrow(rows[t * stride + i]);
        }
    }
}

void latent_attention(Pool& workers, const LatentShape& s, const LatentWeights& w, const LatentPages& pages, const LatentBatch& b,
                      const float* q, float* out) {
    const int64_t width = s.latent + s.rope, rows = b.bounds[b.sequences];
    parallel(workers, rows * s.heads, [&](int64_t task, int) {
        const int64_t t = task / s.heads, h = task % s.heads;
        int64_t sequence = 0;
        while (b.bounds[sequence + 1] <= t) ++sequence;
        const int64_t seen = b.past[sequence] + t - b.bounds[sequence] + 1;
        const float* query = q + task * (s.nope + s.rope);
        const float* kv = static_cast<const float*>(w.packed) + h * (s.nope + s.value) * s.latent;
        std::vector<float> folded(width, 0.0f), context(s.latent, 0.0f), scores(seen);
        for (int64_t n = 0; n < s.nope; ++n)
            for (int64_t c = 0; c < s.latent; ++c) folded[c] += query[n] * kv[n * s.latent + c];
        std::copy_n(query + s.nope, s.rope, folded.begin() + s.latent);
        float largest = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < seen; ++i) {
            const int64_t row = place(b, pages, sequence, i);
            scores[i] = 0.0f;
            for (int64_t c = 0; c < width; ++c) scores[i] += folded[c] * element(pages.rows, pages.format, row * width + c);
            largest = std::max(largest, scores[i] *= s.scale);
        }
        for (int64_t i = 0; i < seen; ++i) {
            const int64_t row = place(b, pages, sequence, i);
            const float p = std::exp(scores[i] - largest);
            total += p;
            for (int64_t c = 0; c < s.latent; ++c) context[c] += p * element(pages.rows, pages.format, row * width + c);
        }
        for (int64_t v = 0; v < s.value; ++v) {
            float sum = 0.0f;
            for (int64_t c = 0; c < s.latent; ++c) sum += kv[(s.nope + v) * s.latent + c] * context[c];
            out[task * s.value + v] = sum / total;
        }
    });
}

}  // namespace gnomon

extern "C" void gnomon_latent_attention(const float* q, const void* pages, int32_t page_format, int64_t page_tokens, const void* kv_b,
                                        int32_t weight_format, int32_t format, const int32_t* table, int64_t table_width,
                                        const int64_t* past, const int64_t* bounds, int64_t sequences, int64_t heads, int64_t nope,
                                        int64_t rope, int64_t value, int64_t latent, float scale, float* out, int32_t threads) {
    const gnomon::LatentShape shape{heads, nope, rope, value, latent, scale};
    std::vector<char> packed(gnomon::latent_weights_bytes(shape, format));
    gnomon::pack_latent_weights(shape, kv_b, weight_format, format, packed.data());
    gnomon::latent_attention(gnomon::pool(threads), shape, {packed.data(), format}, {const_cast<void*>(pages), page_tokens, page_tokens, page_format},
                             {sequences, table_width, table, past, bounds}, q, out);
}

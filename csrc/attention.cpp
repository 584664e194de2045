/* Latent attention over pages: weights, pages, and the choice between the two forms. attention.h says what each function computes. */
#include "attention.h"

#include <vector>

#include "attention_block.h"
#include "gnomon.h"

namespace gnomon {

using namespace attention;

namespace {

const int64_t FEW = 64; /* new tokens of a sequence below which it is absorbed always: checking a draft has the bits of decoding it */

template <int F, class Source>
void pack_head(const LatentShape& s, const Sizes& z, const Source* kv_b, const HeadWeights& to) {
    const int64_t width = z.latent * per_word<F>;
    std::vector<element<F>> rows(2 * std::max(width, s.latent));
    element<F>*first = rows.data(), *second = first + width;
    for (int64_t n = 0; n < s.nope; n += per_word<F>) {
        const bool both = per_word<F> == 2 && n + 1 < s.nope;
        copy_row(kv_b + n * s.latent, s.latent, width, first);
        if (both) copy_row(kv_b + (n + 1) * s.latent, s.latent, width, second);
        weave<F>(first, both ? second : nullptr, s.latent, z.nope, n / per_word<F>, const_cast<word*>(to.absorb));
        std::memcpy(const_cast<word*>(to.keys) + n * z.latent, first, width * sizeof *first);
        if (both) std::memcpy(const_cast<word*>(to.keys) + (n + 1) * z.latent, second, width * sizeof *first);
    }
    std::memset(const_cast<word*>(to.values), 0, z.value_panels * z.latent * PANEL * sizeof(word));
    for (int64_t v = 0; v < s.value; ++v) {
        copy_row(kv_b + (s.nope + v) * s.latent, s.latent, width, first);
        word* panel = const_cast<word*>(to.values) + v / PANEL * z.latent * PANEL + v % PANEL;
        for (int64_t i = 0; i < z.latent; ++i) std::memcpy(panel + i * PANEL, first + i * per_word<F>, sizeof(word));
    }
}

template <int F>
void pack(const LatentShape& s, const void* kv_b, int32_t source_format, void* packed) {
    const Sizes z(s, per_word<F>);
    for (int64_t head = 0; head < s.heads; ++head) {
        const int64_t at = head * (s.nope + s.value) * s.latent;
        const HeadWeights to(s, z, packed, head);
        if (source_format == F32) pack_head<F>(s, z, static_cast<const float*>(kv_b) + at, to);
        else pack_head<F>(s, z, static_cast<const uint16_t*>(kv_b) + at, to);
    }
}

/* Whether `rows` new tokens after `past` cached ones take fewer operations with keys and values written out. */
bool expands(const LatentShape& s, double past, double rows) {
    const double kv_b = static_cast<double>(s.latent * (s.nope + s.value)), pairs = rows * past + rows * (rows + 1) / 2;
    const double absorbed = rows * kv_b + pairs * static_cast<double>(2 * s.latent + s.rope);
    const double expanded = (past + rows) * kv_b + pairs * static_cast<double>(s.nope + s.rope + s.value);
    return !s.absorbed && rows >= FEW && expanded < absorbed;
}

}  // namespace

int64_t latent_weights_bytes(const LatentShape& s, int32_t format) {
    const Sizes z(s, format == F32 ? 1 : 2);
    const int64_t words = z.latent_panels * z.nope * PANEL + s.nope * z.latent + z.value_panels * z.latent * PANEL;
    return s.heads * words * static_cast<int64_t>(sizeof(word));
}

void pack_latent_weights(const LatentShape& s, const void* kv_b, int32_t source_format, int32_t format, void* packed) {
    if (format == F32) pack<SINGLE>(s, kv_b, source_format, packed);
    else pack<PAIRS>(s, kv_b, source_format, packed);
}

void append_latents(const LatentShape& s, const LatentPages& pages, const LatentBatch& b, const float* rows, int64_t stride) {
    const int64_t width = s.latent + s.rope;
    for (int64_t sequence = 0; sequence < b.sequences; ++sequence) {
        for (int64_t t = b.bounds[sequence]; t < b.bounds[sequence + 1]; ++t) {
            void* to = const_cast<void*>(cached_row(s, pages, b, sequence, b.past[sequence] + t - b.bounds[sequence]));
            if (pages.format == F32) copy_row(rows + t * stride, width, width, static_cast<float*>(to));
            else copy_row(rows + t * stride, width, width, static_cast<uint16_t*>(to));
        }
    }
}

void latent_attention(Pool& workers, const LatentShape& s, const LatentWeights& w, const LatentPages& pages, const LatentBatch& b,
                      const float* q, float* out) {
    const Call call{s, w, pages, b, q, out, multiply_rows(w.format)};
    std::vector<Run> absorbed, expanded;
    for (int64_t i = 0; i < b.sequences; ++i) {
        const int64_t rows = b.bounds[i + 1] - b.bounds[i];
        if (rows > 0) (expands(s, b.past[i], rows) ? expanded : absorbed).push_back({i, b.bounds[i], rows, b.past[i] + 1});
    }
    if (!absorbed.empty()) attend_absorbed(workers, call, absorbed.data(), absorbed.size());
    if (!expanded.empty()) attend_expanded(workers, call, expanded.data(), expanded.size());
}

}  // namespace gnomon

extern "C" void gnomon_latent_attention(const float* q, const void* pages, int32_t page_format, int64_t page_tokens, const void* kv_b,
                                        int32_t weight_format, int32_t format, const int32_t* table, int64_t table_width,
                                        const int64_t* past, const int64_t* bounds, int64_t sequences, int64_t heads, int64_t nope,
                                        int64_t rope, int64_t value, int64_t latent, float scale, float* out, int32_t threads) {
    const gnomon::LatentShape shape{heads, nope, rope, value, latent, scale};
    const gnomon::attention::Scratch<char> packed(gnomon::latent_weights_bytes(shape, format));
    gnomon::pack_latent_weights(shape, kv_b, weight_format, format, packed.data);
    gnomon::latent_attention(gnomon::pool(threads), shape, {packed.data, format},
                             {const_cast<void*>(pages), page_tokens, page_tokens, page_format},
                             {sequences, table_width, table, past, bounds}, q, out);
}

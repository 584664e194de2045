/* Routed experts on packed weights. */
#include <algorithm>
#include <vector>

#include "matrix.h"

namespace gnomon {

void experts(Pool& pool, const Experts& e, const float* z, const int32_t* ids, const float* weights, int64_t rows, int64_t k, float* y) {
    if (rows == 0) return;
    const int64_t latent = e.gate[0].in, inner = e.gate[0].out;
    parallel(pool, rows, [&](int64_t row, int) {
        std::vector<float> gate(inner), up(inner), hidden(inner), out(latent);
        Pool& here = gnomon::pool(1);
        std::fill(y + row * latent, y + (row + 1) * latent, 0.0f);
        for (int64_t j = 0; j < k; ++j) {
            const int32_t id = ids[row * k + j];
            multiply(here, e.gate[id], z + row * latent, 1, latent, gate.data(), inner);
            multiply(here, e.up[id], z + row * latent, 1, latent, up.data(), inner);
            gnomon_situ_forward(gate.data(), up.data(), 1, inner, e.beta1, e.beta2, hidden.data(), 1);
            multiply(here, e.down[id], hidden.data(), 1, inner, out.data(), latent);
            for (int64_t i = 0; i < latent; ++i) y[row * latent + i] += weights[row * k + j] * out[i];
        }
    });
}

}  // namespace gnomon

extern "C" void gnomon_experts_forward(const gnomon_experts* experts, const float* z, const int32_t* ids, const float* weights, int64_t rows,
                                       int64_t k, float* y, int32_t threads) {
    gnomon::experts(gnomon::pool(threads), *experts, z, ids, weights, rows, k, y);
}

/* Arrays that are fp32 or bf16: read into fp32, a row at a time. */
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

struct Input {
    const void* data;
    bool half; /* bf16 */

    void row(int64_t at, int64_t n, float* to) const {
        if (!half) {
            std::memcpy(to, static_cast<const float*>(data) + at, n * sizeof(float));
            return;
        }
        const uint16_t* from = static_cast<const uint16_t*>(data) + at;
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
            std::memcpy(to + i, &bits, sizeof bits);
        }
    }

    float one(int64_t at) const {
        float x;
        row(at, 1, &x);
        return x;
    }
};

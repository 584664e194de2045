/* Arrays that are fp32 or bf16: read into fp32, and written from it, a row at a time. */
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

struct Output {
    void* data;
    bool half;

    explicit operator bool() const { return data != nullptr; }

    /* To nearest even; what is not a number stays so. */
    void row(int64_t at, int64_t n, const float* from) const {
        if (!half) {
            std::memcpy(static_cast<float*>(data) + at, from, n * sizeof(float));
            return;
        }
        uint16_t* to = static_cast<uint16_t*>(data) + at;
        for (int64_t i = 0; i < n; ++i) {
            uint32_t bits;
            std::memcpy(&bits, from + i, sizeof bits);
            const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            to[i] = static_cast<uint16_t>(from[i] == from[i] ? rounded : bits >> 16 | 0x40);
        }
    }
};

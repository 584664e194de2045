/* Buffers for weights, and how a matrix gets into its panels and out of them (the layout stands in matrix.h). */
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "matrix.h"

namespace gnomon {

namespace {

const size_t HUGE_PAGE = size_t{1} << 21, SMALL_PAGE = size_t{1} << 14; /* the largest ordinary page of common systems */

/* Bytes that are mapped for a request: huge pages from half of one on. */
size_t mapped(int64_t bytes) {
    const size_t page = bytes >= static_cast<int64_t>(HUGE_PAGE / 2) ? HUGE_PAGE : SMALL_PAGE;
    return (static_cast<size_t>(std::max<int64_t>(bytes, 1)) + page - 1) / page * page;
}

int64_t panels(const Matrix& w) { return (w.out + PANEL - 1) / PANEL; }

float power_of_two(uint8_t e) {
    const uint32_t bits = e == 255 ? 0x7fc00000u : std::max<uint32_t>(static_cast<uint32_t>(e) << 23, 0x00400000u);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float from_bf16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/* Where input i of lane l of a panel stands: bf16 in units of 2 bytes, codes in nibbles. */
int64_t place_bf16(int64_t i, int64_t lane) { return (i / 2 * PANEL + lane) * 2 + i % 2; }
int64_t place_code(int64_t i, int64_t lane) { return (i / 8 * PANEL + lane) * 8 + i % 2 * 4 + i % 8 / 2; }

uint8_t nibble(const uint8_t* codes, int64_t at) { return codes[at / 2] >> (at % 2 * 4) & 15; }

void pack_panel(const void* source, const uint8_t* scales, const Matrix& w, int64_t panel) {
    const int64_t first = panel * PANEL, count = std::min(PANEL, w.out - first), in = w.in;
    const int64_t bytes = data_bytes(w) / panels(w);
    char* data = static_cast<char*>(const_cast<void*>(w.data)) + panel * bytes;
    std::memset(data, 0, bytes);
    for (int64_t lane = 0; lane < count; ++lane) {
        const int64_t row = first + lane;
        if (w.format == F32) {
            const float* from = static_cast<const float*>(source) + row * in;
            for (int64_t i = 0; i < in; ++i) reinterpret_cast<float*>(data)[i * PANEL + lane] = from[i];
        } else if (w.format == BF16) {
            const uint16_t* from = static_cast<const uint16_t*>(source) + row * in;
            for (int64_t i = 0; i < in; ++i) reinterpret_cast<uint16_t*>(data)[place_bf16(i, lane)] = from[i];
        } else {
            const uint8_t* from = static_cast<const uint8_t*>(source) + row * (in / 2);
            for (int64_t i = 0; i < in; ++i) {
                const int64_t at = place_code(i, lane);
                data[at / 2] = static_cast<char>(data[at / 2] | nibble(from, i) << (at % 2 * 4));
            }
        }
    }
    if (w.format != MXFP4) return;
    const int64_t blocks = in / BLOCK;
    uint8_t* to = const_cast<uint8_t*>(w.scales) + panel * blocks * PANEL;
    std::memset(to, 127, blocks * PANEL);
    for (int64_t lane = 0; lane < count; ++lane)
        for (int64_t block = 0; block < blocks; ++block) to[block * PANEL + lane] = scales[(first + lane) * blocks + block];
}

void unpack_row(const Matrix& w, int64_t row, float* values) {
    static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const int64_t panel = row / PANEL, lane = row % PANEL, bytes = data_bytes(w) / panels(w);
    const char* data = static_cast<const char*>(w.data) + panel * bytes;
    for (int64_t i = 0; i < w.in; ++i) {
        if (w.format == F32) {
            values[i] = reinterpret_cast<const float*>(data)[i * PANEL + lane];
        } else if (w.format == BF16) {
            values[i] = from_bf16(reinterpret_cast<const uint16_t*>(data)[place_bf16(i, lane)]);
        } else {
            const uint8_t code = nibble(reinterpret_cast<const uint8_t*>(data), place_code(i, lane));
            const float value = code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
            values[i] = value * power_of_two(w.scales[(panel * (w.in / BLOCK) + i / BLOCK) * PANEL + lane]);
        }
    }
}

}  // namespace

int64_t data_bytes(const Matrix& w) {
    const int64_t lanes = panels(w) * PANEL;
    return w.format == F32 ? lanes * w.in * 4 : w.format == BF16 ? lanes * ((w.in + 1) / 2) * 4 : lanes * w.in / 2;
}

int64_t scale_bytes(const Matrix& w) { return w.format == MXFP4 ? panels(w) * PANEL * (w.in / BLOCK) : 0; }

}  // namespace gnomon

extern "C" void gnomon_buffer_allocate(int64_t bytes, void** address) {
    const size_t size = gnomon::mapped(bytes), slack = size >= gnomon::HUGE_PAGE ? gnomon::HUGE_PAGE : 0;
    void* found = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *address = nullptr;
    if (found == MAP_FAILED) return;
    char* start = static_cast<char*>(found);
    if (slack) { /* a huge page needs an address that it divides */
        const size_t before = (slack - reinterpret_cast<uintptr_t>(start) % slack) % slack;
        if (before) munmap(start, before);
        start += before;
        if (slack > before) munmap(start + size, slack - before);
#ifdef MADV_HUGEPAGE
        madvise(start, size, MADV_HUGEPAGE); /* refused where the system has none: ordinary pages then */
#endif
    }
    *address = start;
}

extern "C" void gnomon_buffer_free(void* address, int64_t bytes) {
    if (address) munmap(address, gnomon::mapped(bytes));
}

extern "C" void gnomon_matrix_bytes(int64_t out, int64_t in, int32_t format, int64_t* data, int64_t* scales) {
    const gnomon::Matrix w{nullptr, nullptr, out, in, format};
    *data = gnomon::data_bytes(w);
    *scales = gnomon::scale_bytes(w);
}

extern "C" void gnomon_matrix_pack(const void* source, const uint8_t* scales, const gnomon_matrix* w, int32_t threads) {
    gnomon::parallel(gnomon::pool(threads), gnomon::panels(*w), [&](int64_t panel, int) { gnomon::pack_panel(source, scales, *w, panel); });
}

extern "C" void gnomon_matrix_unpack(const gnomon_matrix* w, float* values, int32_t threads) {
    gnomon::parallel(gnomon::pool(threads), w->out, [&](int64_t row, int) { gnomon::unpack_row(*w, row, values + row * w->in); });
}

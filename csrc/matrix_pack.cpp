/* Buffers for weights, and how a matrix gets into its panels and out of them (the layout stands in matrix.h). */
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "lanes.h"
#include "matrix_work.h"

namespace gnomon {

namespace {

const size_t HUGE_PAGE = size_t{1} << 21, SMALL_PAGE = size_t{1} << 14; /* the largest ordinary page of common systems */

/* Bytes that are mapped for a request: huge pages from half of one on. */
size_t mapped(int64_t bytes) {
    const size_t page = bytes >= static_cast<int64_t>(HUGE_PAGE / 2) ? HUGE_PAGE : SMALL_PAGE;
    return (static_cast<size_t>(std::max<int64_t>(bytes, 1)) + page - 1) / page * page;
}

int64_t panels(const Matrix& w) { return (w.out + PANEL - 1) / PANEL; }

float from_bf16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint8_t nibble(const uint8_t* codes, int64_t at) { return codes[at / 2] >> (at % 2 * 4) & 15; }

/* One output's place in its group. */
struct Place {
    char* data;
    uint8_t* scales;
    int64_t lanes, lane;

    Place(const Matrix& w, int64_t row) {
        const int64_t group = row / GROUP;
        lanes = (std::min(GROUP, w.out - group * GROUP) + PANEL - 1) / PANEL * PANEL;
        lane = row % GROUP;
        data = static_cast<char*>(const_cast<void*>(w.data)) + group * group_bytes(w);
        scales = w.scales ? const_cast<uint8_t*>(w.scales) + group * GROUP * (w.in / BLOCK) : nullptr;
    }
    float& fp32(int64_t i) const { return reinterpret_cast<float*>(data)[i * lanes + lane]; }
    uint16_t& bf16(int64_t i) const { return reinterpret_cast<uint16_t*>(data)[(i / 2 * lanes + lane) * 2 + i % 2]; }
    uint32_t& codes(int64_t i) const { return reinterpret_cast<uint32_t*>(data)[i / 8 * lanes + lane]; }
    uint8_t& scale(int64_t block) const { return scales[block * lanes + lane]; }
    static int shift(int64_t i) { return static_cast<int>(i % 8 / 2 * 4 + i % 2 * 16); }
};

/* Row `row` of the source; rows beyond `out` are zeros. */
void pack_row(const void* source, const uint8_t* scales, const Matrix& w, int64_t row) {
    Place place(w, std::min(row, w.out - 1));
    place.lane = row % GROUP;
    const bool real = row < w.out;
    const int64_t in = w.in;
    if (w.format == F32) {
        const float* from = static_cast<const float*>(source) + row * in;
        for (int64_t i = 0; i < in; ++i) place.fp32(i) = real ? from[i] : 0.0f;
    } else if (w.format == BF16) {
        const uint16_t* from = static_cast<const uint16_t*>(source) + row * in;
        for (int64_t i = 0; i < in + in % 2; ++i) place.bf16(i) = real && i < in ? from[i] : 0;
    } else {
        const uint8_t* from = static_cast<const uint8_t*>(source) + row * (in / 2);
        for (int64_t first = 0; first < in; first += 8) {
            uint32_t word = 0;
            for (int64_t i = first; real && i < first + 8; ++i) word |= static_cast<uint32_t>(nibble(from, i)) << Place::shift(i);
            place.codes(first) = word;
        }
        for (int64_t block = 0; block < in / BLOCK; ++block) place.scale(block) = real ? scales[row * (in / BLOCK) + block] : 127;
    }
}

void unpack_row(const Matrix& w, int64_t row, float* values) {
    static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const Place from(w, row);
    for (int64_t i = 0; i < w.in; ++i) {
        if (w.format == F32) {
            values[i] = from.fp32(i);
        } else if (w.format == BF16) {
            values[i] = from_bf16(from.bf16(i));
        } else {
            const uint32_t code = from.codes(i) >> Place::shift(i) & 15;
            values[i] = (code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7]) * scale_value(from.scale(i / BLOCK));
        }
    }
}

template <int W>
INLINE void read_body(const char* p, int64_t words, uint64_t* sum) {
    typedef typename Lanes<W>::ints Ints;
    Ints totals[4] = {};
    const int64_t step = 4 * W / 2;
    int64_t i = 0;
    for (; i + step <= words; i += step) {
        for (int j = 0; j < 4; ++j) {
            Ints next;
            std::memcpy(&next, p + i * 8 + j * W * 4, sizeof next);
            totals[j] ^= next;
        }
    }
    totals[0] ^= totals[1] ^ totals[2] ^ totals[3];
    *sum = 0;
    for (int j = 0; j < W; ++j) *sum ^= static_cast<uint64_t>(static_cast<uint32_t>(totals[0][j])) << (j % 2 * 32);
    for (; i < words; ++i) {
        uint64_t last;
        std::memcpy(&last, p + i * 8, sizeof last);
        *sum ^= last;
    }
}

DISPATCH(read, (const char* p, int64_t words, uint64_t* sum), (p, words, sum))

uint64_t read_words(const char* p, int64_t words) {
    uint64_t sum;
    read(p, words, &sum);
    return sum;
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

extern "C" void gnomon_buffer_read(const void* address, int64_t bytes, uint64_t* sum, int32_t threads) {
    const int64_t piece = 1 << 20, pieces = (bytes + piece - 1) / piece;
    std::atomic<uint64_t> total{0};
    gnomon::parallel(gnomon::pool(threads), pieces, [&](int64_t i, int) {
        total ^= gnomon::read_words(static_cast<const char*>(address) + i * piece, std::min(piece, bytes - i * piece) / 8);
    });
    *sum = total;
}

extern "C" void gnomon_matrix_bytes(int64_t out, int64_t in, int32_t format, int64_t* data, int64_t* scales) {
    const gnomon::Matrix w{nullptr, nullptr, out, in, format};
    *data = gnomon::data_bytes(w);
    *scales = gnomon::scale_bytes(w);
}

extern "C" void gnomon_matrix_pack(const void* source, const uint8_t* scales, const gnomon_matrix* w, int32_t threads) {
    /* Neighbouring lanes share words of memory, so one thread packs a whole group. */
    const int64_t rows = gnomon::panels(*w) * gnomon::PANEL;
    gnomon::parallel(gnomon::pool(threads), (rows + gnomon::GROUP - 1) / gnomon::GROUP, [&](int64_t group, int) {
        const int64_t first = group * gnomon::GROUP, last = std::min(first + gnomon::GROUP, rows);
        for (int64_t row = first; row < last; ++row) gnomon::pack_row(source, scales, *w, row);
    });
}

extern "C" void gnomon_matrix_unpack(const gnomon_matrix* w, float* values, int32_t threads) {
    gnomon::parallel(gnomon::pool(threads), w->out, [&](int64_t row, int) { gnomon::unpack_row(*w, row, values + row * w->in); });
}

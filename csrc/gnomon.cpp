/* What the library says about itself. */
#include "gnomon.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lanes.h"

int instruction_set() {
    int best = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) best = 4;
    else if (__builtin_cpu_supports("x86-64-v3")) best = 3;
#endif
    const char* wanted = std::getenv("GNOMON_INSTRUCTION_SET");
    return wanted ? std::min(best, std::atoi(wanted)) : best;
}

bool has_bf16_dots() {
#if defined(__x86_64__) && defined(__GNUC__)
    const char* wanted = std::getenv("GNOMON_INSTRUCTION_SET");
    return instruction_set() == 4 && __builtin_cpu_supports("avx512bf16") && !(wanted && std::strstr(wanted, "-nobf16"));
#else
    return false;
#endif
}

extern "C" int32_t gnomon_abi(void) { return GNOMON_ABI; }

extern "C" const char* gnomon_instruction_set(void) {
    const int set = instruction_set();
    return set == 4 ? (has_bf16_dots() ? "x86-64-v4 with AVX512-BF16" : "x86-64-v4") : set == 3 ? "x86-64-v3" : "portable";
}

/* What the parsers of rows share; without Python. */

#ifndef FLATOUT_ROWS_H
#define FLATOUT_ROWS_H

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

#define EACH_BYTE(x) (0x0101010101010101u * (uint64_t)(x))

static ALWAYS_INLINE uint64_t load_8(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline int is_digit(uint8_t byte)
{
    return (uint8_t)(byte - '0') <= 9;
}

/* Whether all bytes are below 10. */
static ALWAYS_INLINE int are_digits(uint64_t bytes)
{
    return (((bytes + EACH_BYTE(0x76)) | bytes) & EACH_BYTE(0x80)) == 0;
}

/* Digits to a number, the first in the lowest byte: pairs, fours, eights. */
static ALWAYS_INLINE uint64_t whole_of(uint64_t digits)
{
    digits = digits * 10 + (digits >> 8);
    return ((digits & 0x000000FF000000FFu) * 0x000F424000000064u +
            (digits >> 16 & 0x000000FF000000FFu) * 0x0000271000000001u) >> 32;
}

#ifdef __x86_64__
#define WIDE __attribute__((target("avx2,bmi,bmi2,popcnt")))

static inline int is_wide(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}

/* `whole_of` in four lanes. */
WIDE static inline __m256i four_wholes_of(__m256i digits)
{
    __m256i pairs = _mm256_maddubs_epi16(digits, _mm256_set1_epi16(1 << 8 | 10));
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 << 16 | 100));
    return _mm256_add_epi64(_mm256_mul_epu32(fours, _mm256_set1_epi64x(10000)),
                            _mm256_srli_epi64(fours, 32));
}
#endif

/* Bit i: byte i of these 64 is `wanted`. AVX2 would not pay: memory is slower than SSE2. */
static ALWAYS_INLINE uint64_t places_of(char wanted, const uint8_t *bytes)
{
    uint64_t mask = 0;
#ifdef __x86_64__
    const __m128i all = _mm_set1_epi8(wanted);
    for (int i = 0; i < 4; i++) {
        __m128i part = _mm_loadu_si128((const __m128i *)(bytes + 16 * i));
        uint64_t found = (uint16_t)_mm_movemask_epi8(_mm_cmpeq_epi8(part, all));
        mask |= found << 16 * i;
    }
#else
    for (int i = 0; i < 8; i++) {
        /* The high bit of each byte that is zero after the exclusive or; then all together. */
        uint64_t word = load_8(bytes + 8 * i) ^ EACH_BYTE((uint8_t)wanted);
        uint64_t zero = ~(((word & EACH_BYTE(0x7F)) + EACH_BYTE(0x7F)) | word | EACH_BYTE(0x7F));
        mask |= ((zero >> 7) * 0x0102040810204080u >> 56) << 8 * i;
    }
#endif
    return mask;
}

/* Rows that are fetched before their turn. */
#define ROWS_AHEAD 4
#define PAGES_AT_ONCE 8
#define ROW_FETCH 512

/* Another thread may write into the numbers meanwhile: each is read once, and checked where it is
   used. */
static inline int64_t read_once(const int64_t *numbers, int64_t i)
{
    return ((const volatile int64_t *)numbers)[i];
}

/* `head`: bytes before a row that belong to it. Always inline: gcc takes a call for one without
   effects, and drops it. */
static ALWAYS_INLINE void fetch(const uint8_t *text, const int64_t *starts, const int64_t *ends,
                                int64_t row, int head)
{
    uintptr_t start = (uintptr_t)text + (uintptr_t)read_once(starts, row) - (uintptr_t)head;
    uintptr_t end = (uintptr_t)text + (uintptr_t)read_once(ends, row);
    end = end - start < ROW_FETCH ? end : start + ROW_FETCH;
    for (start &= ~(uintptr_t)63; start < end; start += 64)
        __builtin_prefetch((const void *)start);
}

/* A fetch waits for the address of its page. Where rows are far apart that takes long, but several
   pages take no longer than one: so the begins of some rows are fetched at once, then row by row
   what follows them. */
static ALWAYS_INLINE void fetch_ahead(const uint8_t *text, const int64_t *starts,
                                      const int64_t *ends, int64_t rows, int64_t row, int head)
{
    if (row % PAGES_AT_ONCE == 0) {
        int64_t last = row + ROWS_AHEAD + 2 * PAGES_AT_ONCE;
        for (int64_t i = last - PAGES_AT_ONCE; i < last && i < rows; i++) {
            uintptr_t start = (uintptr_t)text + (uintptr_t)read_once(starts, i);
            __builtin_prefetch((const void *)start);
        }
    }
    if (row + ROWS_AHEAD < rows)
        fetch(text, starts, ends, row + ROWS_AHEAD, head);
}

#endif

/* CRC-32C (Castagnoli), which TFRecord puts behind each length and each record; without Python.

   Three ways with the same results: tables, eight bytes at a time (Kounavis and Berry, "Novel
   table lookup-based algorithms for high-performance CRC generation", 2008); the instruction of
   SSE4.2 on three lanes at once, put together by carry-less multiplication (Gopal et al., "Fast CRC
   computation for iSCSI polynomial using CRC32 instruction", Intel, 2011); the instruction of
   ARMv8. */

#ifndef FLATOUT_EXAMPLE_CRC_H
#define FLATOUT_EXAMPLE_CRC_H

#include <string.h>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "../shared/rows.h"

/* From one state of the checksum to that behind these bytes. The state before the first byte is
   all ones; the checksum is the complement of the last state. */
typedef uint32_t Crc(uint32_t state, const uint8_t *data, int64_t bytes);

/* The longest lane, in words of eight bytes. Much longer lanes are read three times as slowly from
   memory: what is fetched ahead then is one run of bytes, not three. */
#define CRC_LANE 32

static uint32_t crc_tables[8][256];
/* Multiplying a state by crc_shifts[k] and dividing the product moves it over k words of zeros. */
static uint32_t crc_shifts[2 * CRC_LANE + 1];

static uint32_t crc_portable(uint32_t state, const uint8_t *data, int64_t bytes)
{
    for (; bytes >= 8; data += 8, bytes -= 8) {
        uint64_t word = load_8(data) ^ state;
        state = 0;
        for (int i = 0; i < 8; i++)
            state ^= crc_tables[7 - i][word >> 8 * i & 255];
    }
    for (; bytes > 0; data++, bytes--)
        state = state >> 8 ^ crc_tables[0][(state ^ *data) & 255];
    return state;
}

#ifdef __x86_64__

#define CRC_TARGET __attribute__((target("sse4.2,pclmul")))

/* The bytes before the last whole words. Zeros before them leave a state of 0 as it is, so that
   their number needs no branch: the state goes into the data instead. Reads eight bytes. */
CRC_TARGET static ALWAYS_INLINE uint64_t crc_first(uint64_t state, const uint8_t *data,
                                                   unsigned bytes)
{
    uint64_t word = (load_8(data) ^ state) << 1 << (63 - 8 * bytes);
    return _mm_crc32_u64(0, word) ^ state >> 8 * bytes;
}

CRC_TARGET static ALWAYS_INLINE uint64_t crc_three_lanes(uint64_t state, const uint8_t *data,
                                                         int64_t lane)
{
    uint64_t a = state, b = 0, c = 0;
    for (int64_t i = 0; i < lane; i++, data += 8) {
        a = _mm_crc32_u64(a, load_8(data));
        b = _mm_crc32_u64(b, load_8(data + 8 * lane));
        c = _mm_crc32_u64(c, load_8(data + 16 * lane));
    }
    __m128i shifts = _mm_set_epi64x(crc_shifts[lane], crc_shifts[2 * lane]);
    __m128i states = _mm_set_epi64x((long long)b, (long long)a);
    __m128i moved = _mm_xor_si128(_mm_clmulepi64_si128(states, shifts, 0x00),
                                  _mm_clmulepi64_si128(states, shifts, 0x11));
    return c ^ _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(moved));
}

/* At least eight bytes may be read, however many there are. */
CRC_TARGET static ALWAYS_INLINE uint32_t crc_padded(uint32_t start, const uint8_t *data,
                                                    int64_t bytes)
{
    uint64_t state = crc_first(start, data, (unsigned)bytes & 7);
    int64_t words = bytes >> 3;
    data += bytes & 7;
    while (words >= 12) {
        int64_t lane = words < 3 * CRC_LANE ? words / 3 : CRC_LANE;
        state = crc_three_lanes(state, data, lane);
        data += 24 * lane;
        words -= 3 * lane;
    }
    for (; words > 0; words--, data += 8)
        state = _mm_crc32_u64(state, load_8(data));
    return (uint32_t)state;
}

CRC_TARGET static uint32_t crc_sse42(uint32_t state, const uint8_t *data, int64_t bytes)
{
    if (bytes >= 8)
        return crc_padded(state, data, bytes);
    for (; bytes > 0; data++, bytes--)
        state = _mm_crc32_u8(state, *data);
    return state;
}

static int crc_runs_sse42(void)
{
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

#endif

#if defined(__aarch64__) && defined(__linux__)

/* Assembly, because compilers differ in what they call this and when they have it. */
static uint32_t crc_armv8(uint32_t state, const uint8_t *data, int64_t bytes)
{
    for (; bytes >= 8; data += 8, bytes -= 8)
        __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(load_8(data)));
    for (; bytes > 0; data++, bytes--)
        __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(state) : "r"(*data));
    return state;
}

static int crc_runs_armv8(void)
{
    const unsigned long has_crc32 = 1 << 7; /* HWCAP_CRC32 of the kernel's interface */
    return (getauxval(AT_HWCAP) & has_crc32) != 0;
}

#endif

static int crc_runs_portable(void)
{
    return 1;
}

/* The ways that were compiled, the fastest first. */
static const struct {
    const char *name;
    Crc *crc;
    int (*runs)(void); /* whether this machine has its instructions */
} crc_ways[] = {
#ifdef __x86_64__
    {"sse4.2", crc_sse42, crc_runs_sse42},
#endif
#if defined(__aarch64__) && defined(__linux__)
    {"armv8", crc_armv8, crc_runs_armv8},
#endif
    {"portable", crc_portable, crc_runs_portable},
};

#define CRC_WAYS (int)(sizeof crc_ways / sizeof *crc_ways)

/* The fastest that runs here. */
static Crc *crc_best;

/* Before anything else here, once. */
static void crc_prepare(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (state & 1 ? 0x82F63B78u : 0);
        crc_tables[0][byte] = state;
    }
    for (int i = 1; i < 8; i++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = crc_tables[i - 1][byte];
            crc_tables[i][byte] = before >> 8 ^ crc_tables[0][before & 255];
        }
    /* x^(64k-33) modulo the polynomial, lowest power in the highest bit: the product of two such
       numbers has its powers one too low, and dividing it moves it by 32. */
    const uint8_t zeros[8] = {0};
    crc_shifts[1] = 1;
    for (int k = 2; k <= 2 * CRC_LANE; k++)
        crc_shifts[k] = crc_portable(crc_shifts[k - 1], zeros, 8);
#ifdef __x86_64__
    __builtin_cpu_init();
#endif
    int way = 0;
    while (!crc_ways[way].runs())
        way++;
    crc_best = crc_ways[way].crc;
}

static ALWAYS_INLINE uint32_t crc_masked(uint32_t last_state)
{
    uint32_t crc = ~last_state;
    return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

#endif

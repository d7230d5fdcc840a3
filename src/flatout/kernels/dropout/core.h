/* Which elements dropout keeps, as a function of (seed, step, draw, sample, element) alone.

   The random words are those of Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random
   Numbers: As Easy as 1, 2, 3", 2011): a block of four words is a function of a counter of four
   words, here (block, sample, draw, step), and of a key of two, here the seed. Eight blocks make a
   group of 32 elements: element e is word (e / 8) % 4 of block 8 * (e / 32) + e % 8. So a group is
   four vectors of eight words as they come, on any width of vectors.

   An element is kept where its word is not below a threshold. */

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { BLOCKS = 8, GROUP = 4 * BLOCKS, ROUNDS = 10 };

#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

typedef void Keep(uint8_t *keep, int64_t first, int64_t groups, uint32_t sample,
                  const uint32_t *seed, uint32_t draw, uint32_t step, uint32_t threshold);

typedef struct {
    uint32_t seed[2], step, draw, threshold;
    Keep *keep;
} Draws;

static inline void philox(uint32_t *c, const uint32_t *seed)
{
    uint32_t k0 = seed[0], k1 = seed[1];
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t a = (uint64_t)PHILOX_M0 * c[0], b = (uint64_t)PHILOX_M1 * c[2];
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)b;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)a;
        k0 += PHILOX_W0, k1 += PHILOX_W1;
    }
}

/* A byte for each element of `groups` groups from number `first` on: 1 where it is kept. */
static void keep_portable(uint8_t *keep, int64_t first, int64_t groups, uint32_t sample,
                          const uint32_t *seed, uint32_t draw, uint32_t step, uint32_t threshold)
{
    for (int64_t block = first * BLOCKS; groups > 0; groups--, keep += GROUP)
        for (int lane = 0; lane < BLOCKS; lane++, block++) {
            uint32_t c[4] = {(uint32_t)block, sample, draw, step};
            philox(c, seed);
            for (int word = 0; word < 4; word++)
                keep[word * BLOCKS + lane] = c[word] >= threshold;
        }
}

#if defined(__x86_64__)

/* Four blocks in the lower halves of 64 bits each; the upper halves hold what no one reads. */
__attribute__((target("avx2"), always_inline)) static inline void
philox_four(__m256i *c, const __m256i *k0, const __m256i *k1)
{
    const __m256i m0 = _mm256_set1_epi64x(PHILOX_M0), m1 = _mm256_set1_epi64x(PHILOX_M1);
    for (int round = 0; round < ROUNDS; round++) {
        __m256i a = _mm256_mul_epu32(c[0], m0), b = _mm256_mul_epu32(c[2], m1);
        c[0] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), k0[round]), c[1]);
        c[1] = b;
        c[2] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), k1[round]), c[3]);
        c[3] = a;
    }
}

__attribute__((target("avx2"))) static void
keep_avx2(uint8_t *keep, int64_t first, int64_t groups, uint32_t sample, const uint32_t *seed,
          uint32_t draw, uint32_t step, uint32_t threshold)
{
    const __m256i least = _mm256_set1_epi32((int)threshold), one = _mm256_set1_epi8(1);
    const __m256i whole = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i k0[ROUNDS], k1[ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        k0[round] = _mm256_set1_epi64x(seed[0] + (uint32_t)round * PHILOX_W0);
        k1[round] = _mm256_set1_epi64x(seed[1] + (uint32_t)round * PHILOX_W1);
    }
    for (int64_t block = first * BLOCKS; groups > 0; groups--, keep += GROUP, block += BLOCKS) {
        const __m256i from = _mm256_set1_epi64x((int64_t)(uint32_t)block);
        const __m256i rest[3] = {_mm256_set1_epi64x(sample), _mm256_set1_epi64x(draw),
                                 _mm256_set1_epi64x(step)};
        __m256i even[4] = {_mm256_add_epi64(from, _mm256_setr_epi64x(0, 2, 4, 6)), rest[0],
                           rest[1], rest[2]};
        __m256i odd[4] = {_mm256_add_epi64(from, _mm256_setr_epi64x(1, 3, 5, 7)), rest[0],
                          rest[1], rest[2]};
        __m256i kept[4];
        philox_four(even, k0, k1);
        philox_four(odd, k0, k1);
        for (int word = 0; word < 4; word++) {
            __m256i words = _mm256_blend_epi32(even[word], _mm256_slli_epi64(odd[word], 32), 0xAA);
            kept[word] = _mm256_cmpeq_epi32(_mm256_max_epu32(words, least), words);
        }
        /* Packing works in halves of 128 bits: the pieces are put in order once at the end. */
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(kept[0], kept[1]),
                                           _mm256_packs_epi32(kept[2], kept[3]));
        bytes = _mm256_and_si256(_mm256_permutevar8x32_epi32(bytes, whole), one);
        _mm256_storeu_si256((__m256i *)keep, bytes);
    }
}

#endif

static Keep *fastest(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        return keep_avx2;
#endif
    return keep_portable;
}

/* A byte for each of the elements [first, first + count) of a sample. */
static void keep_span(const Draws *draws, uint8_t *keep, uint32_t sample, int64_t first,
                      int64_t count)
{
    uint8_t group[GROUP];
    while (count > 0) {
        int64_t into = first % GROUP, whole = into ? 0 : count / GROUP, done = whole * GROUP;
        if (whole)
            draws->keep(keep, first / GROUP, whole, sample, draws->seed, draws->draw, draws->step,
                        draws->threshold);
        else {
            draws->keep(group, first / GROUP, 1, sample, draws->seed, draws->draw, draws->step,
                        draws->threshold);
            done = count < GROUP - into ? count : GROUP - into;
            memcpy(keep, group + into, (size_t)done);
        }
        keep += done, first += done, count -= done;
    }
}

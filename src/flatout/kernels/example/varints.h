/* Packed lists of integers into arrays, as fast as the machine can; without Python.

   All of these read up to 80 bytes beyond the list, and give up on what is wrong or rare: then the
   exact way has to find out. */

#ifndef FLATOUT_EXAMPLE_VARINTS_H
#define FLATOUT_EXAMPLE_VARINTS_H

#include "exact.h"

/* Bit i: byte i of these 64 is not the last one of its varint. */
typedef uint64_t Unfinished(const uint8_t *bytes);

static ALWAYS_INLINE uint64_t unfinished_plain(const uint8_t *bytes)
{
    uint64_t mask = 0;
#ifdef __x86_64__
    for (int i = 0; i < 4; i++) {
        __m128i part = _mm_loadu_si128((const __m128i *)(bytes + 16 * i));
        mask |= (uint64_t)(uint16_t)_mm_movemask_epi8(part) << 16 * i;
    }
#else
    for (int i = 0; i < 8; i++)
        mask |= ((load_8(bytes + 8 * i) >> 7 & EACH_BYTE(1)) * 0x0102040810204080u >> 56) << 8 * i;
#endif
    return mask;
}

/* What a packed list of varints holds. */
typedef struct {
    int64_t count; /* -1: the last varint has no end */
    uint64_t over_3, over_10; /* not 0: there are varints of more bytes */
} Look;

static ALWAYS_INLINE Look look_at(const uint8_t *packed, int64_t bytes, Unfinished *unfinished)
{
    Look look = {.count = bytes};
    uint64_t ones = 0, twos = 0, fours = 0;
    for (int64_t block = 0; block < bytes; block += 64) {
        uint64_t one = unfinished(packed + block);
        if (bytes - block < 64)
            one &= ((uint64_t)1 << (bytes - block)) - 1;
        look.count -= __builtin_popcountll(one);
        /* Bits that end a run of two, three, four, eight or ten, begun here or in the last block. */
        uint64_t two = one & (one << 1 | ones >> 63);
        uint64_t four = two & (two << 2 | twos >> 62);
        look.over_3 |= two & (one << 2 | ones >> 62);
        uint64_t eight = four & (four << 4 | fours >> 60);
        look.over_10 |= eight & (two << 8 | twos >> 56);
        ones = one;
        twos = two;
        fours = four;
    }
    if (bytes > 0 && packed[bytes - 1] >= 128)
        look.count = -1;
    return look;
}

static ALWAYS_INLINE void put_number(void *to, int64_t place, uint64_t value, int is_int32)
{
    if (is_int32)
        ((uint32_t *)to)[place] = (uint32_t)value;
    else
        ((uint64_t *)to)[place] = value;
}

/* Varints, one by one. How many there are, or -1 if that has to be found out the exact way. */
static ALWAYS_INLINE int64_t put_ints_plain(const uint8_t *packed, int64_t bytes, void *to,
                                            int64_t capacity, int64_t room, int is_int32)
{
    Part part = {packed, packed + bytes};
    int64_t count = 0;
    (void)room;
    for (; part.at < part.end; count++) {
        uint64_t word = load_8(part.at), last = ~word & EACH_BYTE(0x80);
        if (count == capacity)
            return -1;
        if (last == 0) {
            if (read_varint(&part, LONG_VARINT, &word) != GOOD)
                return -1;
        } else {
            part.at += (__builtin_ctzll(last) >> 3) + 1;
            word &= last ^ (last - 1); /* nothing behind the last byte */
            word = (word & 0x007F007F007F007Fu) | (word & 0x7F007F007F007F00u) >> 1;
            word = (word & 0x00003FFF00003FFFu) | (word & 0x3FFF00003FFF0000u) >> 2;
            word = (word & 0x000000000FFFFFFFu) | (word & 0x0FFFFFFF00000000u) >> 4;
        }
        if (is_int32 && (int64_t)word != (int32_t)word)
            return -1;
        put_number(to, count, word, is_int32);
    }
    return part.at == part.end ? count : -1;
}

#ifdef __x86_64__

#define WIDER __attribute__((target("avx2,bmi,bmi2,popcnt,sse4.2,pclmul")))

/* Four varints of up to three bytes each are found in sixteen bytes by which of the first twelve
   are unfinished: Plaisance, Kurz and Lemire, "Vectorized VByte decoding", 2015. */
#define STEP_BITS 12
#define VALUES_AT_ONCE 20
static uint16_t steps[1 << STEP_BITS]; /* places in `shuffles` */
static uint8_t shuffles[256 * 16];

static void steps_prepare(void)
{
    for (int lengths = 0; lengths < 256; lengths++)
        for (int lane = 0, from = 0; lane < 4; lane++) {
            int length = (lengths >> 2 * lane & 3) + 1;
            for (int i = 0; i < 4; i++)
                shuffles[16 * lengths + 4 * lane + i] = i < length ? (uint8_t)(from + i) : 0x80;
            from += length;
        }
    for (int mask = 0; mask < 1 << STEP_BITS; mask++) {
        int lengths = 0, from = 0;
        for (int at = 0, lane = 0; at < STEP_BITS && lane < 4; at++)
            if ((mask >> at & 1) == 0) {
                lengths |= ((at - from) & 3) << 2 * lane++;
                from = at + 1;
            }
        steps[mask] = (uint16_t)(16 * lengths);
    }
}

WIDER static ALWAYS_INLINE uint64_t unfinished_wide(const uint8_t *bytes)
{
    int low = _mm256_movemask_epi8(_mm256_loadu_si256((const __m256i *)bytes));
    int high = _mm256_movemask_epi8(_mm256_loadu_si256((const __m256i *)(bytes + 32)));
    return (uint64_t)(uint32_t)high << 32 | (uint32_t)low;
}

/* Four lanes of four bytes, seven bits of each. */
WIDER static ALWAYS_INLINE __m128i four_ints(const uint8_t *packed, const uint8_t *shuffle)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)packed);
    bytes = _mm_shuffle_epi8(bytes, _mm_loadu_si128((const __m128i *)shuffle));
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(0x7F));
    __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi16((short)0x8001), bytes);
    return _mm_madd_epi16(pairs, _mm_set1_epi32(1 << 30 | 1));
}

/* Exactly `count` varints of up to three bytes, in steps of four; 0 if they are not. The last step
   also writes what stands behind. */
WIDER static ALWAYS_INLINE int put_ints_of_3(const uint8_t *packed, int64_t bytes, void *to,
                                            int64_t count, int is_int32)
{
    int64_t at = 0, done = 0;
    for (; done < count && at < bytes; done += VALUES_AT_ONCE) {
        int64_t left = count - done < VALUES_AT_ONCE ? count - done : VALUES_AT_ONCE;
        uint64_t mask = unfinished_wide(packed + at), last = ~mask;
        uint64_t runs = mask & mask >> 1 & mask >> 2;
        if ((bytes - at < 64 ? _bzhi_u64(runs, (unsigned)(bytes - at)) : runs) != 0)
            return 0;
        for (int64_t i = 0, begin = 0; i < left; i += 4) {
            /* Behind the last byte of the fourth, eighth ...: no step waits for another one. */
            if (i > 0)
                begin = (int64_t)_tzcnt_u64(_pdep_u64((uint64_t)1 << (i - 1), last)) + 1;
            unsigned next = (unsigned)(mask >> (begin & 63)) & ((1 << STEP_BITS) - 1);
            __m128i four = four_ints(packed + at + begin, shuffles + steps[next]);
            if (is_int32)
                _mm_storeu_si128((__m128i *)((int32_t *)to + done + i), four);
            else
                _mm256_storeu_si256((__m256i *)((int64_t *)to + done + i),
                                    _mm256_cvtepu32_epi64(four));
        }
        at += (int64_t)_tzcnt_u64(_pdep_u64((uint64_t)1 << (left - 1), last)) + 1;
    }
    return at == bytes && done >= count;
}

/* Exactly `count` varints; 0 if they are not. */
WIDER static ALWAYS_INLINE int put_ints_of_10(const uint8_t *packed, int64_t bytes, void *to,
                                             int64_t count, int is_int32)
{
    int64_t begin = 0, done = 0;
    for (int64_t block = 0; block < bytes; block += 64) {
        uint64_t last = ~unfinished_wide(packed + block);
        if (bytes - block < 64)
            last = _bzhi_u64(last, (unsigned)(bytes - block));
        for (; last != 0 && done < count; last = _blsr_u64(last), done++) {
            int64_t next = block + (int64_t)_tzcnt_u64(last) + 1, length = next - begin;
            uint64_t value = _pext_u64(load_8(packed + begin), EACH_BYTE(0x7F));
            value = _bzhi_u64(value, (unsigned)(7 * length));
            if (length > 8)
                value |= (uint64_t)(packed[begin + 8] & 127) << 56;
            if (length > 9)
                value |= (uint64_t)packed[begin + 9] << 63;
            if (length > LONG_VARINT || (is_int32 && (int64_t)value != (int32_t)value))
                return 0;
            put_number(to, done, value, is_int32);
            begin = next;
        }
    }
    return done == count;
}

WIDER static __attribute__((noinline)) int64_t put_ints_looked_at(const uint8_t *packed,
                                                                 int64_t bytes, void *to,
                                                                 int64_t capacity, int64_t room,
                                                                 int is_int32)
{
    Look look = look_at(packed, bytes, unfinished_wide);
    if (look.count > capacity || look.count < 0)
        return -1;
    if (look.over_3 == 0 && room - look.count >= 3)
        return put_ints_of_3(packed, bytes, to, look.count, is_int32) ? look.count : -1;
    return put_ints_of_10(packed, bytes, to, look.count, is_int32) ? look.count : -1;
}

WIDER static ALWAYS_INLINE int64_t put_ints_wide(const uint8_t *packed, int64_t bytes, void *to,
                                                int64_t capacity, int64_t room, int is_int32)
{
    if (bytes < 4)
        return put_ints_plain(packed, bytes, to, capacity, room, is_int32);
    /* Most rows are full. Later rows are written later, so that their room may be used. */
    if (room - capacity >= 3 && put_ints_of_3(packed, bytes, to, capacity, is_int32))
        return capacity;
    return put_ints_looked_at(packed, bytes, to, capacity, room, is_int32);
}

#endif

#endif

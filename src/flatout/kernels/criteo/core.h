/* Rows of Criteo's click logs: a label, integers and hexadecimal categories between tabs; without
   Python.

   A row is read twice. The fast way finds all tabs, then turns each field of up to 8 digits into
   its number without a branch on how long it is, and gives up on anything unusual. Then the exact
   way goes from left to right and says what is wrong, and where. The text may be changed by others
   meanwhile: every access is bounded by the row, whatever stands there. */

#ifndef FLATOUT_CRITEO_CORE_H
#define FLATOUT_CRITEO_CORE_H

#include <string.h>

#include "../shared/rows.h"

/* What is wrong with a row: `Bad` in __init__.py. */
enum {
    GOOD,
    TOO_FEW_FIELDS,
    TOO_MANY_FIELDS,
    BAD_LABEL,
    BAD_INTEGER,
    INTEGER_OVERFLOW,
    BAD_HEX,
    HEX_TOO_LONG,
    OUTSIDE
};

typedef enum { NOTHING, FLOAT32, INT32, INT64 } Kind;

/* Values of all rows, `width` of them in each. */
typedef struct {
    void *values;
    int64_t width;
    Kind kind;
    int64_t missing; /* what an empty field becomes; for FLOAT32 its bits */
} Column;

typedef struct {
    uint64_t buckets, inverse;
} Hashing;

typedef struct {
    const uint8_t *text;
    int64_t bytes;
    const int64_t *starts, *ends;
    int64_t rows;
    int has_label;
    Column labels, integers, categories; /* labels may be NOTHING: checked, then dropped */
    Hashing hashing;
    uint8_t *status;
    int64_t *at;
    int32_t *tabs; /* room for SLACK more than there are fields */
} Criteo;

#define SLACK 16
/* The fast way reads this far beyond a row. */
#define BEYOND 64

/* ---- values into columns ---- */

static int64_t float_bits(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

/* Without a branch on `is_missing`, which nothing could predict. */
static ALWAYS_INLINE void put(const Column *column, int64_t place, int64_t value, int is_missing)
{
    int64_t bits = column->kind == FLOAT32 ? float_bits((float)value) : value;
    bits = is_missing ? column->missing : bits;
    if (column->kind == INT64) {
        memcpy((int64_t *)column->values + place, &bits, 8);
    } else if (column->kind != NOTHING) {
        uint32_t half = (uint32_t)bits;
        memcpy((uint32_t *)column->values + place, &half, 4);
    }
}

static void put_zeros(const Column *column, int64_t row)
{
    size_t item = column->kind == INT64 ? 8 : 4, width = (size_t)column->width;
    if (column->kind != NOTHING && width > 0)
        memset((char *)column->values + (size_t)row * width * item, 0, width * item);
}

/* 0 buckets: the hash itself. */
static Hashing hashing_of(int64_t buckets)
{
    /* More than there are hashes are as good as none. */
    if (buckets == 0 || buckets > UINT32_MAX)
        return (Hashing){0, 0};
    return (Hashing){(uint64_t)buckets, UINT64_MAX / (uint64_t)buckets + 1};
}

/* `hash % buckets` by two multiplications: Lemire, Kaser and Kurz, "Faster remainder by direct
   computation", 2019; exact for 32 bits. */
static ALWAYS_INLINE int64_t in_bucket(Hashing hashing, uint32_t hash)
{
    if (hashing.buckets == 0)
        return hash;
#ifdef __SIZEOF_INT128__
    return (int64_t)(((unsigned __int128)(hashing.inverse * hash) * hashing.buckets) >> 64);
#else
    return (int64_t)(hash % hashing.buckets);
#endif
}

/* ---- the exact way ---- */

/* The value of a hexadecimal digit, or -1. */
static inline int hex_digit(uint8_t byte)
{
    uint8_t letter = (uint8_t)((byte | 0x20) - 'a');
    return is_digit(byte) ? byte - '0' : letter < 6 ? letter + 10 : -1;
}

/* An optional minus and at least one digit. `*at` is moved to what is wrong. */
static int exact_integer(const uint8_t **at, const uint8_t *end, Kind kind, int64_t *value)
{
    const uint8_t *start = *at, *p = start;
    int is_negative = p < end && *p == '-', overflows = 0;
    uint64_t limit = (kind == INT32 ? INT32_MAX : INT64_MAX) + (uint64_t)is_negative, sum = 0;
    p += is_negative;
    if (p == end) {
        *at = p;
        return BAD_INTEGER;
    }
    for (; p < end; p++) {
        uint8_t digit = (uint8_t)(*p - '0');
        if (digit > 9) {
            *at = p;
            return BAD_INTEGER;
        }
        overflows |= sum > (limit - digit) / 10;
        sum = overflows ? 0 : sum * 10 + digit;
    }
    *value = (int64_t)(is_negative ? 0 - sum : sum);
    return overflows ? INTEGER_OVERFLOW : GOOD;
}

static int exact_hex(const uint8_t **at, const uint8_t *end, uint32_t *value)
{
    const uint8_t *start = *at;
    *value = 0;
    for (const uint8_t *p = start; p < end; p++) {
        int digit = hex_digit(*p);
        if (digit < 0 || p - start == 8) {
            *at = p;
            return digit < 0 ? BAD_HEX : HEX_TOO_LONG;
        }
        *value = *value << 4 | (uint32_t)digit;
    }
    return GOOD;
}

static int exact_field(Criteo *job, int64_t row, int64_t field, const uint8_t **at,
                       const uint8_t *end)
{
    int64_t value = 0;
    if (job->has_label && field == 0) {
        int code = exact_integer(at, end, job->labels.kind, &value);
        if (code == GOOD)
            put(&job->labels, row, value, 0);
        return code == BAD_INTEGER ? BAD_LABEL : code;
    }
    field -= job->has_label;
    if (field < job->integers.width) {
        int is_missing = *at == end;
        int code = is_missing ? GOOD : exact_integer(at, end, job->integers.kind, &value);
        if (code == GOOD)
            put(&job->integers, row * job->integers.width + field, value, is_missing);
        return code;
    }
    field -= job->integers.width;
    uint32_t hash;
    int is_missing = *at == end;
    int code = exact_hex(at, end, &hash);
    if (code == GOOD)
        put(&job->categories, row * job->categories.width + field, in_bucket(job->hashing, hash),
            is_missing);
    return code;
}

/* What is wrong with the row, and in `*wrong` where. */
static int exact_row(Criteo *job, int64_t row, int64_t start, int64_t stop, int64_t *wrong)
{
    const uint8_t *at = job->text + start, *end = job->text + stop;
    int64_t fields = job->has_label + job->integers.width + job->categories.width;
    int code = GOOD;
    for (int64_t field = 0; code == GOOD && field < fields; field++) {
        if (field > 0 && at == end) {
            code = TOO_FEW_FIELDS;
            break;
        }
        at += field > 0; /* the tab */
        const uint8_t *tab = at < end ? memchr(at, '\t', (size_t)(end - at)) : NULL;
        const uint8_t *field_end = tab != NULL ? tab : end;
        code = exact_field(job, row, field, &at, field_end);
        if (code == GOOD)
            at = field_end;
    }
    if (code == GOOD && at < end)
        code = TOO_MANY_FIELDS;
    *wrong = at - job->text;
    return code;
}

/* ---- the fast way ---- */

/* Where the tabs are: tabs[0] is before the row, tabs[fields] its end. 0 unless there are as many
   as there should be. */
static ALWAYS_INLINE int find_tabs(const uint8_t *row, int64_t bytes, int64_t fields, int32_t *tabs)
{
    int64_t count = 1;
    tabs[0] = -1;
    for (int64_t block = 0; block < bytes; block += 64) {
        uint64_t mask = places_of('\t', row + block);
        if (bytes - block < 64)
            mask &= ((uint64_t)1 << (bytes - block)) - 1;
        int64_t found = __builtin_popcountll(mask);
        if (count + found > fields)
            return 0;
        /* More places are written than are there: the next block overwrites them. That saves a
           branch that would often be predicted wrongly. */
        int32_t *to = tabs + count;
        for (int64_t i = 0; i < found; i += 8)
            for (int64_t j = i; j < i + 8; j++, mask &= mask - 1)
                to[j] = (int32_t)(block + (mask != 0 ? __builtin_ctzll(mask) : 64));
        count += found;
    }
    tabs[count] = (int32_t)bytes;
    return count == fields;
}

/* The field's bytes, less '0' if they are digits, the last one on top; all of 8 or fewer. */
static ALWAYS_INLINE uint64_t digits_of(const uint8_t *field, int32_t bytes)
{
    unsigned half = (unsigned)(32 - 4 * bytes) & 63;
    return (load_8(field) ^ EACH_BYTE('0')) << half << half;
}

/* The number in 8 decimal digits. 0 unless all of them are. */
static ALWAYS_INLINE int decimal(uint64_t digits, int64_t *value)
{
    *value = (int64_t)whole_of(digits);
    return are_digits(digits);
}

/* The number in 8 hexadecimal digits. 0 unless all of them are. */
static ALWAYS_INLINE int hexadecimal(uint64_t digits, uint32_t *value)
{
    /* 'A' to 'F' and 'a' to 'f', less '0', are 0x71 and 0x51 and more: bit 6 tells them apart. */
    uint64_t letter = digits >> 6 & EACH_BYTE(1);
    uint64_t nibbles = (digits & EACH_BYTE(0x0F)) + letter * 9;
    uint64_t wrong = (nibbles & EACH_BYTE(0x10)) |
                     (((nibbles + EACH_BYTE(6)) >> 4 & EACH_BYTE(1)) ^ letter) |
                     ((digits & EACH_BYTE(0xD0)) ^ letter * 0x50) |
                     (digits & EACH_BYTE(0x20) & ~(letter * 0x20));
    nibbles = (nibbles << 4 | nibbles >> 8) & 0x00FF00FF00FF00FFu;
    nibbles = (nibbles << 8 | nibbles >> 16) & 0x0000FFFF0000FFFFu;
    *value = (uint32_t)(nibbles << 16 | nibbles >> 32);
    return wrong == 0;
}

/* Fields into a column, one by one. 0 where that has to be done the exact way. */
static ALWAYS_INLINE int put_integers(const Column *column, int64_t place, const uint8_t *text,
                                      const int32_t *tabs, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *field = text + tabs[i] + 1;
        int32_t bytes = tabs[i + 1] - tabs[i] - 1;
        int64_t value;
        if ((!decimal(digits_of(field, bytes), &value) || bytes > 8) &&
            exact_integer(&field, text + tabs[i + 1], column->kind, &value) != GOOD)
            return 0;
        put(column, place + i, value, bytes == 0);
    }
    return 1;
}

static ALWAYS_INLINE int put_categories(const Column *column, Hashing hashing, int64_t place,
                                        const uint8_t *text, const int32_t *tabs, int64_t count)
{
    int is_good = 1;
    for (int64_t i = 0; i < count; i++) {
        int32_t bytes = tabs[i + 1] - tabs[i] - 1;
        uint32_t value;
        is_good &= hexadecimal(digits_of(text + tabs[i] + 1, bytes), &value) & (bytes <= 8);
        put(column, place + i, in_bucket(hashing, value), bytes == 0);
    }
    return is_good;
}

#ifdef __x86_64__

/* ---- the fast way, four fields at a time ---- */

/* As digits_of, and how long the fields are; one longer than 8 bytes gives anything. */
WIDE static inline __m256i four_fields(const uint8_t *text, const int32_t *tabs, __m256i *bytes)
{
    __m128i from = _mm_loadu_si128((const __m128i *)tabs);
    __m128i to = _mm_loadu_si128((const __m128i *)(tabs + 1));
    __m256i fields = _mm256_set_epi64x(
        (long long)load_8(text + tabs[3] + 1), (long long)load_8(text + tabs[2] + 1),
        (long long)load_8(text + tabs[1] + 1), (long long)load_8(text + tabs[0] + 1));
    *bytes = _mm256_cvtepi32_epi64(_mm_sub_epi32(_mm_sub_epi32(to, from), _mm_set1_epi32(1)));
    return _mm256_sllv_epi64(
        _mm256_xor_si256(fields, _mm256_set1_epi8('0')),
        _mm256_sub_epi64(_mm256_set1_epi64x(64), _mm256_slli_epi64(*bytes, 3)));
}

WIDE static inline void put_four(const Column *column, int64_t place, __m256i values,
                                 __m256i is_missing)
{
    if (column->kind == INT64) {
        values = _mm256_blendv_epi8(values, _mm256_set1_epi64x(column->missing), is_missing);
        _mm256_storeu_si256((__m256i *)((int64_t *)column->values + place), values);
        return;
    }
    const __m256i lower_halves = _mm256_set_epi32(0, 0, 0, 0, 6, 4, 2, 0);
    __m128i halves = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(values, lower_halves));
    __m128i missing = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(is_missing, lower_halves));
    if (column->kind == FLOAT32)
        halves = _mm_castps_si128(_mm_cvtepi32_ps(halves));
    halves = _mm_blendv_epi8(halves, _mm_set1_epi32((int32_t)column->missing), missing);
    _mm_storeu_si128((__m128i *)((int32_t *)column->values + place), halves);
}

/* Bit i: all bytes of lane i are ones in `is_good`, and its field has at most 8 bytes. */
WIDE static inline int good_lanes(__m256i is_good, __m256i bytes)
{
    __m256i is_whole = _mm256_cmpeq_epi64(is_good, _mm256_set1_epi8(-1));
    __m256i is_long = _mm256_cmpgt_epi64(bytes, _mm256_set1_epi64x(8));
    return _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_andnot_si256(is_long, is_whole)));
}

WIDE static int put_integers_wide(const Column *column, int64_t place, const uint8_t *text,
                                  const int32_t *tabs, int64_t count)
{
    if (count < 4)
        return put_integers(column, place, text, tabs, count);
    for (int64_t i = 0; i < count; i += 4) {
        i = i + 4 < count ? i : count - 4; /* the last four, some of them once more */
        __m256i bytes, digits = four_fields(text, tabs + i, &bytes);
        __m256i is_digit = _mm256_cmpeq_epi8(_mm256_min_epu8(digits, _mm256_set1_epi8(9)), digits);
        put_four(column, place + i, four_wholes_of(digits),
                 _mm256_cmpeq_epi64(bytes, _mm256_setzero_si256()));
        int bad = good_lanes(is_digit, bytes) ^ 15;
        for (; bad != 0; bad &= bad - 1) {
            int64_t field = i + __builtin_ctz((unsigned)bad);
            if (!put_integers(column, place + field, text, tabs + field, 1))
                return 0;
        }
    }
    return 1;
}

/* As in_bucket: a product of 64 bits by 32 is two of 32 by 32. */
WIDE static inline __m256i in_buckets(Hashing hashing, __m256i hashes)
{
    if (hashing.buckets == 0)
        return hashes;
    const __m256i buckets = _mm256_set1_epi64x((long long)hashing.buckets);
    const __m256i low = _mm256_set1_epi64x((long long)(hashing.inverse & UINT32_MAX));
    const __m256i high = _mm256_set1_epi64x((long long)(hashing.inverse >> 32));
    __m256i part = _mm256_add_epi64(_mm256_mul_epu32(hashes, low),
                                    _mm256_slli_epi64(_mm256_mul_epu32(hashes, high), 32));
    __m256i carry = _mm256_srli_epi64(_mm256_mul_epu32(part, buckets), 32);
    part = _mm256_mul_epu32(_mm256_srli_epi64(part, 32), buckets);
    return _mm256_srli_epi64(_mm256_add_epi64(part, carry), 32);
}

WIDE static int put_categories_wide(const Column *column, Hashing hashing, int64_t place,
                                    const uint8_t *text, const int32_t *tabs, int64_t count)
{
    const __m256i nine = _mm256_set1_epi8(9), five = _mm256_set1_epi8(5);
    /* The lower bytes of four pairs, last first, as a number of 32 bits in 64. */
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_set_epi64x((long long)0x80808080080A0C0Eu, (long long)0x8080808000020406u));
    int good = 15;
    if (count < 4)
        return put_categories(column, hashing, place, text, tabs, count);
    for (int64_t i = 0; i < count; i += 4) {
        i = i + 4 < count ? i : count - 4; /* the last four, some of them once more */
        __m256i bytes, digits = four_fields(text, tabs + i, &bytes);
        __m256i letters = _mm256_sub_epi8(_mm256_or_si256(digits, _mm256_set1_epi8(0x20)),
                                          _mm256_set1_epi8(('a' ^ '0') | 0x20));
        __m256i is_digit = _mm256_cmpeq_epi8(_mm256_min_epu8(digits, nine), digits);
        __m256i is_letter = _mm256_cmpeq_epi8(_mm256_min_epu8(letters, five), letters);
        __m256i nibbles = _mm256_add_epi8(_mm256_and_si256(digits, _mm256_set1_epi8(0x0F)),
                                          _mm256_andnot_si256(is_digit, nine));
        __m256i pairs = _mm256_maddubs_epi16(nibbles, _mm256_set1_epi16(1 << 8 | 16));
        __m256i values = in_buckets(hashing, _mm256_shuffle_epi8(pairs, order));
        put_four(column, place + i, values, _mm256_cmpeq_epi64(bytes, _mm256_setzero_si256()));
        good &= good_lanes(_mm256_or_si256(is_digit, is_letter), bytes);
    }
    return good == 15;
}

#endif

/* ---- all rows ---- */

/* Fields into a column. 0 where that has to be done the exact way. */
typedef int PutIntegers(const Column *column, int64_t place, const uint8_t *text,
                        const int32_t *tabs, int64_t count);
typedef int PutCategories(const Column *column, Hashing hashing, int64_t place, const uint8_t *text,
                          const int32_t *tabs, int64_t count);

/* 1 if the row was read; else whatever was written has to be written again. */
static ALWAYS_INLINE int fast_row(const Criteo *job, int64_t row, int64_t start, int64_t stop,
                                  PutIntegers *write_integers, PutCategories *write_categories)
{
    /* Copies, which no store can change: the loops need not look again. */
    const Column integers = job->integers, categories = job->categories;
    const uint8_t *text = job->text + start;
    const int64_t fields = job->has_label + integers.width + categories.width;
    const int32_t *tabs = job->tabs;
    if (stop - start > INT32_MAX - BEYOND || job->bytes - stop < BEYOND ||
        !find_tabs(text, stop - start, fields, job->tabs))
        return 0;
    if (job->has_label) {
        int64_t value;
        if (tabs[1] < 1 || tabs[1] > 8 || !decimal(digits_of(text, tabs[1]), &value))
            return 0;
        put(&job->labels, row, value, 0);
        tabs++;
    }
    return write_integers(&integers, row * integers.width, text, tabs, integers.width) &&
           write_categories(&categories, job->hashing, row * categories.width, text,
                          tabs + integers.width, categories.width);
}

static ALWAYS_INLINE int64_t parse_rows(Criteo *job, PutIntegers *write_integers,
                                        PutCategories *write_categories)
{
    int64_t bad = 0;
    for (int64_t row = 0; row < job->rows; row++) {
        int64_t start = read_once(job->starts, row), stop = read_once(job->ends, row), wrong = start;
        int code = GOOD;
        fetch_ahead(job->text, job->starts, job->ends, job->rows, row, 0);
        if (start < 0 || stop < start || stop > job->bytes)
            code = OUTSIDE;
        else if (!fast_row(job, row, start, stop, write_integers, write_categories))
            code = exact_row(job, row, start, stop, &wrong);
        job->status[row] = (uint8_t)code;
        if (code != GOOD) {
            job->at[row] = wrong;
            put_zeros(&job->labels, row);
            put_zeros(&job->integers, row);
            put_zeros(&job->categories, row);
            bad++;
        }
    }
    return bad;
}

#ifdef __x86_64__
WIDE static int64_t parse_rows_wide(Criteo *job)
{
    return parse_rows(job, put_integers_wide, put_categories_wide);
}
#endif

/* Parse all rows, and return how many are bad. `is_plain`: as on a processor without AVX2. */
static int64_t criteo_parse(Criteo *job, int is_plain)
{
#ifdef __x86_64__
    if (!is_plain && is_wide())
        return parse_rows_wide(job);
#endif
    (void)is_plain;
    return parse_rows(job, put_integers, put_categories);
}

#endif

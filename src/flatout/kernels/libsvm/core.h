/* Rows of LibSVM text: `label [qid:n] index:value index:value ... # comment`; without Python.

   A row is read in chunks, in two ways. The fast way finds all colons and blanks of a chunk, so that
   it knows every number's place before it reads the first, and stops at what it does not know. The
   exact way reads on from there, pair by pair, and says what is wrong, and where. The text may be
   changed by others meanwhile: every access is bounded by the row, whatever stands there. */

#ifndef FLATOUT_LIBSVM_CORE_H
#define FLATOUT_LIBSVM_CORE_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../shared/rows.h"

/* What is wrong with a row: `Bad` in __init__.py. */
enum {
    GOOD,
    OUTSIDE,
    NO_LABEL,
    MULTI_LABEL,
    NOT_WHOLE,
    BAD_LABEL,
    BAD_QID,
    BAD_INDEX,
    BAD_VALUE,
    NO_COLON,
    TOO_LARGE,
    NOT_FINITE,
    BELOW_BASE,
    BEYOND_LIMIT,
    UNORDERED,
    TOO_MANY,
    TWO_LINES
};

typedef enum { NOTHING, FLOAT32, FLOAT64, INT32, INT64 } Kind;

/* What becomes of the pairs of a row. */
typedef enum { SURVEY, PAIRS, DENSE } Sink;

typedef struct {
    const uint8_t *text;
    int64_t bytes;
    const int64_t *starts, *ends;
    int64_t rows;
    int64_t base, limit;   /* base <= index < base + limit */
    Kind label_as;         /* what a label has to fit into */
    Kind value_as;         /* what a value has to fit into */
    uint8_t *status;
    int64_t *at;
    void *labels;          /* of kind `label_kind` */
    Kind label_kind;
    int64_t *qid;          /* may be NULL */
    Sink sink;
    int64_t room;          /* SURVEY: the most pairs in a row */
    int32_t *lengths;      /* SURVEY */
    int64_t low, high;     /* SURVEY: smallest and largest index of good rows */
    const int64_t *offsets;/* PAIRS: where each row goes in ids and values */
    int64_t items;         /* PAIRS: of ids, and of values */
    void *ids, *values;    /* PAIRS: of kind `id_kind` and `value_as` */
    Kind id_kind;
    float *out;            /* DENSE: `limit` for each row */
} Libsvm;

#define CHUNK 512
/* A pair has a digit, a colon, a byte and a blank; the row's end counts as a blank. */
#define MOST_PAIRS (CHUNK / 4 + 1)
#define BLOCK 64
/* The fast way reads this far beyond a chunk. */
#define BEYOND 64

/* ---- numbers, the exact way ---- */

typedef struct {
    const uint8_t *at, *end;
} Reader;

static inline int is_letter(uint8_t byte)
{
    return (uint8_t)((byte | 0x20) - 'a') < 26;
}

static inline int is_blank(uint8_t byte)
{
    return byte == ' ' || byte == '\t';
}

/* Whether a token may end here. */
static inline int is_over(const Reader *reader)
{
    return reader->at >= reader->end || is_blank(*reader->at) || *reader->at == '#';
}

static inline int is_at(const Reader *reader, uint8_t byte)
{
    return reader->at < reader->end && *reader->at == byte;
}

static inline void skip_blanks(Reader *reader)
{
    while (reader->at < reader->end && is_blank(*reader->at))
        reader->at++;
}

#define MOST_DIGITS 19    /* any so many fit into 64 bits */
#define ENOUGH_DIGITS 800 /* 767 tell a double from its neighbors, one more says "and then some" */

static double power_of_two(int power)
{
    uint64_t bits = (uint64_t)(power + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The double next to `digits` * 10^power, by the library. Only digits and an exponent are handed
   over, so that the locale's decimal point does not matter. */
static double by_library(const char *digits, size_t count, int64_t power)
{
    char text[ENOUGH_DIGITS + 16], *at = text + count;
    memcpy(text, digits, count);
    *at++ = 'e';
    *at++ = power < 0 ? '-' : '+';
    power = power < 0 ? -power : power;
    power = power < 99999 ? power : 99999;
    for (int64_t unit = 10000; unit > 0; unit /= 10)
        *at++ = (char)('0' + power / unit % 10);
    *at = 0;
    return strtod(text, NULL);
}

static const double POWERS_OF_TEN[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                       1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                       1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

#ifdef __SIZEOF_INT128__
#define MOST_FIVES 27 /* 5^27 fits into 63 bits */

/* The double next to `digits` * 10^power: 128 bits hold the product, or more of the quotient than
   rounding looks at. */
static double by_integers(uint64_t digits, int power)
{
    static const uint64_t FIVES[] = {
        1u, 5u, 25u, 125u, 625u, 3125u, 15625u, 78125u, 390625u, 1953125u, 9765625u, 48828125u,
        244140625u, 1220703125u, 6103515625u, 30517578125u, 152587890625u, 762939453125u,
        3814697265625u, 19073486328125u, 95367431640625u, 476837158203125u, 2384185791015625u,
        11920928955078125u, 59604644775390625u, 298023223876953125u, 1490116119384765625u,
        7450580596923828125u};
    uint64_t fives = FIVES[power < 0 ? -power : power];
    if (power >= 0)
        return (double)((unsigned __int128)digits * fives) * power_of_two(power);
    int up = __builtin_clzll(digits), down = __builtin_clzll(fives);
    unsigned __int128 dividend = (unsigned __int128)(digits << up) << 62;
    uint64_t divisor = fives << down;
    int64_t quotient = (int64_t)(dividend / divisor);
    /* A last bit that is set stands for all that follows. */
    quotient |= dividend % divisor != 0;
    return (double)quotient * power_of_two(power - 62 - up + down);
}
#endif

/* The double next to `digits` * 10^power. */
static double rounded(uint64_t digits, int64_t power)
{
    if (digits == 0)
        return 0;
    /* Both numbers are exact doubles, so that one operation rounds once. */
    if (digits <= (uint64_t)1 << 53 && power >= -22 && power <= 22)
        return power < 0 ? (double)digits / POWERS_OF_TEN[-power]
                         : (double)digits * POWERS_OF_TEN[power];
#ifdef __SIZEOF_INT128__
    if (power >= -MOST_FIVES && power <= MOST_FIVES)
        return by_integers(digits, (int)power);
#endif
    char text[MOST_DIGITS + 1];
    size_t count = 0;
    for (uint64_t rest = digits; rest > 0; rest /= 10)
        count++;
    for (size_t i = count; i > 0; digits /= 10)
        text[--i] = (char)('0' + digits % 10);
    return by_library(text, count, power);
}

/* The same of any number of digits, with at most one point among them. */
static double rounded_long(const uint8_t *at, const uint8_t *end, int64_t power)
{
    char digits[ENOUGH_DIGITS];
    size_t count = 0;
    int is_more = 0, is_fraction = 0;
    for (; at < end; at++) {
        uint8_t byte = *at;
        if (byte == '.') {
            is_fraction = 1;
            continue;
        }
        int is_kept = count < ENOUGH_DIGITS - 1;
        power += !is_kept - is_fraction;
        if (!is_kept)
            is_more |= byte != '0';
        else if (count > 0 || byte != '0')
            digits[count++] = (char)('0' + (uint8_t)(byte - '0') % 10);
    }
    if (count == 0)
        return 0;
    if (is_more) {
        digits[count++] = '1';
        power--;
    }
    return by_library(digits, count, power);
}

/* Digits after an e. More of them than matter are as good as a very large number. */
static int read_power(Reader *reader, int64_t *power)
{
    int is_negative = is_at(reader, '-');
    int64_t sum = 0;
    reader->at += is_negative || is_at(reader, '+');
    if (reader->at >= reader->end || !is_digit(*reader->at))
        return 0;
    for (; reader->at < reader->end && is_digit(*reader->at); reader->at++)
        sum = sum < (int64_t)1 << 56 ? sum * 10 + (*reader->at - '0') : sum;
    *power = is_negative ? -sum : sum;
    return 1;
}

/* "nan", "inf" or "infinity" in any case. */
static int is_word(const Reader *reader)
{
    static const char *const WORDS[] = {"nan", "inf", "infinity"};
    for (int word = 0; word < 3; word++) {
        const uint8_t *at = reader->at;
        const char *letter = WORDS[word];
        while (*letter != 0 && at < reader->end && (*at | 0x20) == *letter)
            at++, letter++;
        if (*letter == 0 && (at == reader->end || !(is_letter(*at) || is_digit(*at))))
            return 1;
    }
    return 0;
}

/* What the reader's digits make of `sum`, modulo 2^64. */
static inline uint64_t read_digits(Reader *reader, uint64_t sum)
{
    for (; reader->end - reader->at >= 8; reader->at += 8) {
        uint64_t digits = load_8(reader->at) ^ EACH_BYTE('0');
        if (!are_digits(digits))
            break;
        sum = sum * 100000000 + whole_of(digits);
    }
    for (; reader->at < reader->end && is_digit(*reader->at); reader->at++)
        sum = sum * 10 + (uint64_t)(*reader->at - '0');
    return sum;
}

/* A decimal number, with or without sign, point and exponent. GOOD, NOT_FINITE, or `bad` with the
   reader at the first byte that does not fit. What follows is for the caller to look at. */
static int read_number(Reader *reader, int bad, double *value)
{
    Reader r = *reader;
    int is_negative = is_at(&r, '-');
    int64_t power = 0;
    r.at += is_negative || is_at(&r, '+');
    const uint8_t *digits = r.at, *point = NULL;
    uint64_t sum = read_digits(&r, 0);
    if (is_at(&r, '.')) {
        point = r.at++;
        sum = read_digits(&r, sum);
        power = point + 1 - r.at;
    }
    const uint8_t *digits_end = r.at;
    int64_t count = digits_end - digits - (point != NULL);
    if (count == 0) {
        if (point == NULL && is_word(&r))
            return NOT_FINITE;
        *reader = r;
        return bad;
    }
    int64_t exponent = 0;
    if (r.at < r.end && (*r.at | 0x20) == 'e') {
        r.at++;
        if (!read_power(&r, &exponent)) {
            *reader = r;
            return bad;
        }
    }
    for (const uint8_t *at = digits; count > MOST_DIGITS && (*at == '0' || *at == '.'); at++)
        count -= *at == '0'; /* leading zeros do not count */
    double size = count <= MOST_DIGITS ? rounded(sum, power + exponent)
                                       : rounded_long(digits, digits_end, exponent);
    *value = is_negative ? -size : size;
    *reader = r;
    return GOOD;
}

/* Digits only. GOOD, TOO_LARGE where they do not fit into int64 with the reader at the first digit,
   or `bad` with the reader at a byte that is not a digit. */
static int read_whole(Reader *reader, int bad, int64_t *value)
{
    const uint8_t *start = reader->at;
    uint64_t sum = 0;
    int is_too_large = 0;
    for (; reader->at < reader->end && is_digit(*reader->at); reader->at++) {
        uint64_t digit = (uint64_t)(*reader->at - '0');
        is_too_large |= sum > ((uint64_t)INT64_MAX - digit) / 10;
        sum = is_too_large ? 0 : sum * 10 + digit;
    }
    if (reader->at == start)
        return bad;
    if (is_too_large) {
        reader->at = start;
        return TOO_LARGE;
    }
    *value = (int64_t)sum;
    return GOOD;
}

/* What a number must be below, in size, to become a finite one of this kind. Halfway between the
   largest float32 and the next power of two, rounding goes up, and beyond. */
static inline double bound_of(Kind kind)
{
    return kind == FLOAT32 ? 0x1.ffffffp127 : (double)INFINITY;
}

/* ---- rows, the exact way ---- */

static int read_label(const Libsvm *job, Reader *reader, double *label)
{
    const uint8_t *token;
    skip_blanks(reader);
    token = reader->at;
    if (is_over(reader) || (reader->end - token >= 4 && memcmp(token, "qid:", 4) == 0))
        return NO_LABEL;
    int code = read_number(reader, BAD_LABEL, label);
    if (code != GOOD)
        return code;
    if (is_at(reader, ','))
        return MULTI_LABEL;
    if (!is_over(reader) && !is_at(reader, ':'))
        return BAD_LABEL;
    if (is_at(reader, ':'))
        code = NO_LABEL;
    else if (!(fabs(*label) < bound_of(job->label_as)))
        code = NOT_FINITE;
    else if (job->label_as == INT64 && !(fabs(*label) < 0x1p53 && *label == (double)(int64_t)*label))
        code = NOT_WHOLE;
    if (code != GOOD)
        reader->at = token;
    return code;
}

static int read_qid(Reader *reader, int64_t *qid)
{
    *qid = -1;
    skip_blanks(reader);
    if (reader->end - reader->at < 4 || memcmp(reader->at, "qid:", 4) != 0)
        return GOOD;
    reader->at += 4;
    int code = read_whole(reader, BAD_QID, qid);
    return code == GOOD && !is_over(reader) ? BAD_QID : code;
}

static int read_pair(const Libsvm *job, Reader *reader, int64_t *index, double *value)
{
    const uint8_t *token = reader->at;
    if (is_at(reader, '-') && reader->end - token > 1 && is_digit(token[1]))
        return BELOW_BASE;
    int code = read_whole(reader, BAD_INDEX, index);
    if (code != GOOD)
        return code;
    if (!is_at(reader, ':'))
        return is_over(reader) ? NO_COLON : BAD_INDEX;
    token = ++reader->at;
    code = read_number(reader, BAD_VALUE, value);
    if (code == GOOD && !is_over(reader))
        return BAD_VALUE;
    if (code == GOOD && !(fabs(*value) < bound_of(job->value_as))) {
        reader->at = token;
        return NOT_FINITE;
    }
    return code;
}

/* ---- chunks, the fast way ---- */

typedef struct {
    int64_t index[MOST_PAIRS];
    double value[MOST_PAIRS];
    uint32_t used;  /* bytes up to the first token that was not read */
    int is_whole;   /* all tokens that end in the chunk were read */
    double bound;   /* of values */
    uint32_t colons[CHUNK + 16];
    uint32_t blanks[CHUNK + 16]; /* the first is one before the chunk */
    uint8_t copy[CHUNK + BEYOND];
} Chunk;

/* A bit for each of 64 bytes. */
typedef struct {
    uint64_t colons, blanks;
} Found;

/* What differs from processor to processor. */
typedef struct {
    Found (*find)(const uint8_t *);
    uint32_t (*spread)(uint64_t, uint32_t, uint32_t *);
    uint32_t (*indices)(Chunk *, const uint8_t *, uint32_t);
    int (*decimal)(const uint8_t *, uint32_t, double *);
} Way;

/* The index of one pair. */
static ALWAYS_INLINE int fast_index(Chunk *chunk, const uint8_t *text, uint32_t pair)
{
    uint32_t start = chunk->blanks[pair] + 1, colon = chunk->colons[pair], count = colon - start;
    if (count - 1 < 8) {
        uint64_t digits = (load_8(text + start) ^ EACH_BYTE('0')) << (64 - 8 * count);
        chunk->index[pair] = (int64_t)whole_of(digits);
        return are_digits(digits);
    }
    Reader reader = {text + start, text + colon};
    return start < colon && read_whole(&reader, BAD_INDEX, &chunk->index[pair]) == GOOD &&
           reader.at == reader.end;
}

/* The value of one pair, whatever it looks like. */
static __attribute__((noinline)) int slow_value(Chunk *chunk, const uint8_t *text, uint32_t pair)
{
    Reader reader = {text + chunk->colons[pair] + 1, text + chunk->blanks[pair + 1]};
    return reader.at < reader.end &&
           read_number(&reader, BAD_VALUE, &chunk->value[pair]) == GOOD &&
           reader.at == reader.end && fabs(chunk->value[pair]) < chunk->bound;
}

/* How many of the pairs from `pair` on have plain values. Without a call in the loop, constants stay
   in registers. */
static ALWAYS_INLINE uint32_t fast_values(Chunk *chunk, const uint8_t *text, uint32_t pair,
                                          uint32_t pairs, const Way *way)
{
    for (; pair < pairs; pair++) {
        uint32_t from = chunk->colons[pair] + 1, count = chunk->blanks[pair + 1] - from;
        uint8_t digit = (uint8_t)(text[from] - '0');
        if (count == 1 && digit <= 9)
            chunk->value[pair] = digit;
        else if (!way->decimal(text + from, count, &chunk->value[pair]))
            break;
    }
    return pair;
}

/* Read pairs from `size` bytes that begin with a token, as long as indices are above `last`.
   `is_end` says that the row ends there. Returns how many. */
static ALWAYS_INLINE int read_chunk(Chunk *chunk, const uint8_t *text, uint32_t size, int is_end,
                                    int64_t last, const Way *way)
{
    uint32_t colons = 0, blanks = 0, pair = 0;
    for (uint32_t block = 0; block < size + (uint32_t)is_end; block += BLOCK) {
        Found found = way->find(text + block);
        if (size - block < BLOCK) {
            uint64_t end = (uint64_t)1 << (size - block);
            found.colons &= end - 1;
            found.blanks = (found.blanks & (end - 1)) | (is_end ? end : 0);
        }
        colons += way->spread(found.colons, block, chunk->colons + colons);
        blanks += way->spread(found.blanks, block, chunk->blanks + 1 + blanks);
    }
    chunk->blanks[0] = UINT32_MAX;
    uint32_t pairs = colons < blanks ? colons : blanks;
    pairs = way->indices(chunk, text, pairs < MOST_PAIRS ? pairs : MOST_PAIRS);
    for (; pair < pairs && chunk->index[pair] > last; pair++)
        last = chunk->index[pair];
    pairs = pair;
    pair = fast_values(chunk, text, 0, pairs, way);
    while (pair < pairs && slow_value(chunk, text, pair))
        pair = fast_values(chunk, text, pair + 1, pairs, way);
    uint32_t start = chunk->blanks[pair] + 1;
    chunk->used = start < size ? start : size;
    chunk->is_whole = pair == blanks;
    return (int)pair;
}

static inline Found find_portable(const uint8_t *text)
{
    return (Found){places_of(':', text), places_of(' ', text) | places_of('\t', text)};
}

static inline uint32_t spread_portable(uint64_t bits, uint32_t base, uint32_t *places)
{
    uint32_t count = 0;
    for (; bits != 0; bits &= bits - 1)
        places[count++] = base + (uint32_t)__builtin_ctzll(bits);
    return count;
}

static inline uint32_t indices_portable(Chunk *chunk, const uint8_t *text, uint32_t pairs)
{
    uint32_t pair = 0;
    while (pair < pairs && fast_index(chunk, text, pair))
        pair++;
    return pair;
}

/* Decimals are for the exact way. */
static inline int decimal_portable(const uint8_t *text, uint32_t count, double *value)
{
    (void)text;
    (void)count;
    (void)value;
    return 0;
}

static int chunk_portable(Chunk *chunk, const uint8_t *text, uint32_t size, int is_end, int64_t last)
{
    static const Way way = {find_portable, spread_portable, indices_portable, decimal_portable};
    return read_chunk(chunk, text, size, is_end, last, &way);
}

#ifdef __x86_64__
WIDE static inline Found find_avx2(const uint8_t *text)
{
    const __m256i colon = _mm256_set1_epi8(':'), space = _mm256_set1_epi8(' ');
    const __m256i tab = _mm256_set1_epi8('\t');
    __m256i low = _mm256_loadu_si256((const __m256i *)text);
    __m256i high = _mm256_loadu_si256((const __m256i *)(text + 32));
    __m256i low_blank = _mm256_or_si256(_mm256_cmpeq_epi8(low, space), _mm256_cmpeq_epi8(low, tab));
    __m256i high_blank =
        _mm256_or_si256(_mm256_cmpeq_epi8(high, space), _mm256_cmpeq_epi8(high, tab));
    return (Found){
        (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, colon)) |
            (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, colon)) << 32,
        (uint32_t)_mm256_movemask_epi8(low_blank) |
            (uint64_t)(uint32_t)_mm256_movemask_epi8(high_blank) << 32,
    };
}

/* Eight at a time, without a branch on how many there are. */
WIDE static inline uint32_t spread_avx2(uint64_t bits, uint32_t base, uint32_t *places)
{
    uint32_t count = (uint32_t)__builtin_popcountll(bits);
    for (uint32_t done = 0; done < count; done += 8) {
        for (int i = 0; i < 8; i++) {
            uint32_t place = base + (uint32_t)_tzcnt_u64(bits);
            /* Or gcc collects the eight in a vector, which takes longer than storing them. */
            __asm__("" : "+r"(place));
            *places++ = place;
            bits = _blsr_u64(bits);
        }
    }
    return count;
}

/* Four indices of up to 8 digits. 0 where one of them is not. */
WIDE static inline int four_indices(Chunk *chunk, const uint8_t *text, uint32_t pair)
{
    const uint32_t *blanks = chunk->blanks + pair;
    __m128i colons = _mm_loadu_si128((const __m128i *)(chunk->colons + pair));
    __m128i counts = _mm_sub_epi32(colons, _mm_loadu_si128((const __m128i *)blanks));
    /* One too many each: the blank counts as well. */
    __m128i less = _mm_sub_epi32(counts, _mm_set1_epi32(2));
    __m128i are_short = _mm_cmpeq_epi32(_mm_min_epu32(less, _mm_set1_epi32(7)), less);
    __m256i digits = _mm256_setr_epi64x((long long)load_8(text + (blanks[0] + 1)),
                                        (long long)load_8(text + (blanks[1] + 1)),
                                        (long long)load_8(text + (blanks[2] + 1)),
                                        (long long)load_8(text + (blanks[3] + 1)));
    __m128i shifts = _mm_sub_epi32(_mm_set1_epi32(72), _mm_slli_epi32(counts, 3));
    digits = _mm256_xor_si256(digits, _mm256_set1_epi8('0'));
    digits = _mm256_sllv_epi64(digits, _mm256_cvtepu32_epi64(shifts));
    __m256i are_digits =
        _mm256_cmpeq_epi8(_mm256_min_epu8(digits, _mm256_set1_epi8(9)), digits);
    _mm256_storeu_si256((__m256i *)(chunk->index + pair), four_wholes_of(digits));
    return _mm256_movemask_epi8(are_digits) == -1 && _mm_movemask_epi8(are_short) == 0xFFFF;
}

WIDE static inline uint32_t indices_avx2(Chunk *chunk, const uint8_t *text, uint32_t pairs)
{
    uint32_t pair = 0;
    while (pair < pairs) {
        if (pair + 4 <= pairs && four_indices(chunk, text, pair))
            pair += 4;
        else if (fast_index(chunk, text, pair))
            pair++;
        else
            break;
    }
    return pair;
}

/* Up to 15 digits with at most one point among them, and perhaps a minus before. The digits are
   moved to the right end of 16 bytes, over the point, and become a number in four steps. */
WIDE static inline int decimal_avx2(const uint8_t *text, uint32_t count, double *value)
{
    static const int8_t PLACES[] = {-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6,
                                    -5,  -4,  -3,  -2,  -1,  0,   1,   2,  3,  4,  5,
                                    6,   7,   8,   9,   10,  11,  12,  13, 14};
    static const int8_t LAST[31] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    uint32_t is_negative = *text == '-';
    text += is_negative;
    count -= is_negative;
    if (count - 1 > 15)
        return 0;
    __m128i bytes = _mm_loadu_si128((const __m128i *)text);
    uint32_t points = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8('.')));
    uint32_t point = (uint32_t)__builtin_ctz(points | (uint32_t)1 << count);
    uint32_t digits = count - (point < count), fraction = digits - point;
    if (digits - 1 > 14)
        return 0;
    /* Where each byte comes from: negative for a zero, and one further after the point. */
    __m128i from = _mm_add_epi8(_mm_loadu_si128((const __m128i *)(PLACES + digits)),
                                _mm_loadu_si128((const __m128i *)(LAST + fraction)));
    __m128i ones = _mm_shuffle_epi8(_mm_sub_epi8(bytes, _mm_set1_epi8('0')), from);
    if (_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_min_epu8(ones, _mm_set1_epi8(9)), ones)) != 0xFFFF)
        return 0;
    __m128i twos = _mm_maddubs_epi16(ones, _mm_set1_epi16(0x010A));
    __m128i fours = _mm_madd_epi16(twos, _mm_set1_epi32(0x00010064));
    __m128i eights = _mm_madd_epi16(_mm_packus_epi32(fours, fours), _mm_set1_epi32(0x00012710));
    uint64_t halves = (uint64_t)_mm_cvtsi128_si64(eights);
    int64_t whole = (int64_t)((halves & UINT32_MAX) * 100000000 + (halves >> 32));
    /* The sign is put in by hand, for a compiler makes a branch of a condition. */
    double size = (double)whole / POWERS_OF_TEN[fraction];
    uint64_t bits;
    memcpy(&bits, &size, sizeof bits);
    bits |= (uint64_t)is_negative << 63;
    memcpy(value, &bits, sizeof bits);
    return 1;
}

WIDE static int chunk_avx2(Chunk *chunk, const uint8_t *text, uint32_t size, int is_end,
                           int64_t last)
{
    static const Way way = {find_avx2, spread_avx2, indices_avx2, decimal_avx2};
    return read_chunk(chunk, text, size, is_end, last, &way);
}
#endif

typedef int ReadChunk(Chunk *, const uint8_t *, uint32_t, int, int64_t);

static ReadChunk *fastest(void)
{
#ifdef __x86_64__
    if (is_wide())
        return chunk_avx2;
#endif
    return chunk_portable;
}

/* ---- rows ---- */

/* How far a row has come. */
typedef struct {
    int64_t number, count, room, first, last;
    int64_t place; /* PAIRS: of its first pair */
} Row;

static inline size_t size_of(Kind kind)
{
    return kind == FLOAT32 || kind == INT32 ? 4 : kind == NOTHING ? 0 : 8;
}

static inline void zero(void *values, Kind kind, int64_t from, int64_t count)
{
    if (count > 0)
        memset((char *)values + (size_t)from * size_of(kind), 0, (size_t)count * size_of(kind));
}

static void put_values(const Libsvm *job, int64_t place, const Chunk *chunk, int pairs)
{
    if (job->value_as == FLOAT64) {
        memcpy((double *)job->values + place, chunk->value, (size_t)pairs * sizeof(double));
        return;
    }
    float *restrict values = (float *)job->values + place;
    for (int i = 0; i < pairs; i++)
        values[i] = (float)chunk->value[i];
}

static void put_ids(const Libsvm *job, int64_t place, const Chunk *chunk, int pairs)
{
    const int64_t base = job->base;
    if (job->id_kind == INT64) {
        int64_t *restrict ids = (int64_t *)job->ids + place;
        for (int i = 0; i < pairs; i++)
            ids[i] = chunk->index[i] - base;
    } else {
        int32_t *restrict ids = (int32_t *)job->ids + place;
        for (int i = 0; i < pairs; i++)
            ids[i] = (int32_t)(chunk->index[i] - base);
    }
}

/* Take the pairs of a chunk, whose indices ascend. GOOD, or what is wrong with one of them: then
   none is taken. */
static int take_pairs(const Libsvm *job, Row *row, const Chunk *chunk, int pairs)
{
    int64_t first = chunk->index[0], last = chunk->index[pairs - 1];
    if (first < job->base)
        return BELOW_BASE;
    if (last - job->base >= job->limit)
        return BEYOND_LIMIT;
    if (first <= row->last)
        return UNORDERED;
    if (row->count + pairs > row->room)
        return TOO_MANY;
    if (job->sink == PAIRS) {
        put_ids(job, row->place + row->count, chunk, pairs);
        put_values(job, row->place + row->count, chunk, pairs);
    } else if (job->sink == DENSE) {
        float *out = job->out + row->number * job->limit;
        for (int i = 0; i < pairs; i++)
            out[chunk->index[i] - job->base] = (float)chunk->value[i];
    }
    if (row->count == 0)
        row->first = first;
    row->last = last;
    row->count += pairs;
    return GOOD;
}

/* Read as many pairs as one chunk has, the fast way. Returns up to where the exact way has to read:
   the reader's place, unless there is something in the chunk that is not plain. */
static const uint8_t *read_fast(const Libsvm *job, Row *row, Reader *reader, Chunk *chunk,
                                ReadChunk *read)
{
    const uint8_t *text = reader->at;
    int is_end = reader->end - text <= CHUNK;
    uint32_t size = is_end ? (uint32_t)(reader->end - text) : CHUNK;
    const uint8_t *stop = text + size;
    if (job->text + job->bytes - stop < BEYOND) {
        memcpy(chunk->copy, text, size);
        memset(chunk->copy + size, 0, BEYOND);
        text = chunk->copy;
    }
    int pairs = read(chunk, text, size, is_end, row->last);
    if (pairs == 0 || take_pairs(job, row, chunk, pairs) != GOOD)
        return stop;
    reader->at += chunk->used;
    return chunk->is_whole ? reader->at : stop;
}

static int read_pairs(const Libsvm *job, Row *row, Reader *reader, Chunk *chunk, ReadChunk *read)
{
    const uint8_t *stop = reader->at; /* here the fast way begins, or begins again */
    for (;;) {
        skip_blanks(reader);
        if (is_over(reader))
            break;
        if (reader->at >= stop) {
            stop = read_fast(job, row, reader, chunk, read);
            continue;
        }
        const uint8_t *token = reader->at;
        int code = read_pair(job, reader, chunk->index, chunk->value);
        if (code != GOOD)
            return code;
        code = take_pairs(job, row, chunk, 1);
        if (code != GOOD) {
            reader->at = token;
            return code;
        }
    }
    const uint8_t *newline = memchr(reader->at, '\n', (size_t)(reader->end - reader->at));
    if (newline == NULL)
        return GOOD;
    reader->at = newline;
    return TWO_LINES;
}

static void put_label(const Libsvm *job, int64_t row, double label)
{
    if (job->label_kind == FLOAT32)
        ((float *)job->labels)[row] = (float)label;
    else if (job->label_kind == FLOAT64)
        ((double *)job->labels)[row] = label;
    else
        ((int64_t *)job->labels)[row] = (int64_t)label;
}

/* Where the row's outputs are, checked again: others may change the offsets meanwhile. */
static int open_row(const Libsvm *job, Row *row, int64_t number)
{
    *row = (Row){.number = number, .room = job->room, .last = -1};
    if (job->sink == DENSE) {
        row->room = INT64_MAX;
        zero(job->out, FLOAT32, number * job->limit, job->limit);
    } else if (job->sink == PAIRS) {
        int64_t end = read_once(job->offsets, number + 1);
        row->place = read_once(job->offsets, number);
        row->room = end - row->place;
        if (row->place < 0 || end < row->place || end > job->items) {
            row->room = 0;
            return 0;
        }
    }
    return 1;
}

/* Write what a row of this code leaves. */
static void close_row(Libsvm *job, const Row *row, int code, double label, int64_t qid)
{
    int64_t number = row->number, count = code == GOOD ? row->count : 0;
    job->status[number] = (uint8_t)code;
    put_label(job, number, code == GOOD ? label : 0);
    if (job->qid != NULL)
        job->qid[number] = code == GOOD ? qid : 0;
    if (job->sink == SURVEY) {
        job->lengths[number] = (int32_t)count;
        if (count > 0) {
            job->low = row->first < job->low ? row->first : job->low;
            job->high = row->last > job->high ? row->last : job->high;
        }
    } else if (job->sink == PAIRS) {
        zero(job->ids, job->id_kind, row->place + count, row->room - count);
        zero(job->values, job->value_as, row->place + count, row->room - count);
    } else if (code != GOOD) {
        zero(job->out, FLOAT32, number * job->limit, job->limit);
    }
}

/* GOOD, or a code with `*wrong` at the byte of the text. */
static int read_row(const Libsvm *job, Row *row, Chunk *chunk, ReadChunk *read, int64_t start,
                    int64_t stop, double *label, int64_t *qid, int64_t *wrong)
{
    *wrong = start;
    if (start < 0 || stop < start || stop > job->bytes)
        return OUTSIDE;
    Reader reader = {job->text + start, job->text + stop};
    while (reader.end > reader.at && (is_blank(reader.end[-1]) || reader.end[-1] == '\n' ||
                                      reader.end[-1] == '\r'))
        reader.end--;
    int code = read_label(job, &reader, label);
    if (code == GOOD)
        code = read_qid(&reader, qid);
    if (code == GOOD)
        code = read_pairs(job, row, &reader, chunk, read);
    if (code >= BAD_LABEL && code <= BAD_VALUE && is_at(&reader, '\n'))
        code = TWO_LINES;
    *wrong = reader.at - job->text;
    return code;
}

/* Read all rows, chunks by `read`. Returns how many are bad. */
static int64_t libsvm_read(Libsvm *job, ReadChunk *read)
{
    Chunk chunk;
    Row row;
    int64_t bad = 0;
    chunk.bound = bound_of(job->value_as);
    for (int64_t number = 0; number < job->rows; number++) {
        int64_t start = read_once(job->starts, number), stop = read_once(job->ends, number);
        int64_t qid = -1, wrong = start;
        double label = 0;
        fetch_ahead(job->text, job->starts, job->ends, job->rows, number, 0);
        int code = OUTSIDE;
        if (open_row(job, &row, number))
            code = read_row(job, &row, &chunk, read, start, stop, &label, &qid, &wrong);
        close_row(job, &row, code, label, qid);
        if (code != GOOD) {
            job->at[number] = wrong;
            bad++;
        }
    }
    return bad;
}

#endif

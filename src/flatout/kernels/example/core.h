/* Records of TFRecord that hold tf.train.Example messages; without Python.

   A record is read twice. The fast way expects what every writer of today writes: map entries of a
   key and a value in that order, lists packed, nothing unknown. It gives up on anything else. Then
   the exact way, which reads whatever Protocol Buffers allow, decodes the record again from left
   to right and says what is wrong, and where. The text may be changed by others meanwhile: every
   access is bounded by the record, whatever stands there. */

#ifndef FLATOUT_EXAMPLE_CORE_H
#define FLATOUT_EXAMPLE_CORE_H

#include "varints.h"

/* The fast way reads this far beyond a record: the longest key that is compared at once. */
#define BEYOND 160

/* ---- a record ---- */

/* Values of a packed list into an output. How many there are, or -1 if that has to be found out the
   exact way. */
typedef int64_t PutInts(const uint8_t *packed, int64_t bytes, void *to, int64_t capacity,
                        int64_t room, int is_int32);

static ALWAYS_INLINE int64_t put_floats(const uint8_t *packed, int64_t bytes, void *to,
                                        int64_t capacity)
{
    int64_t count = bytes >> 2;
    if (bytes % 4 != 0 || count > capacity)
        return -1;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (int64_t i = 0; i < count; i++)
        ((uint32_t *)to)[i] = load_4(packed + 4 * i);
#else
    memcpy(to, packed, (size_t)bytes);
#endif
    return count;
}

static ALWAYS_INLINE int64_t put_bytes(const uint8_t *packed, int64_t bytes, void *to,
                                       int64_t capacity)
{
    if (bytes > capacity)
        return -1;
    memcpy(to, packed, (size_t)bytes);
    return bytes;
}

static ALWAYS_INLINE int put_list(const Job *job, int64_t row, int64_t i, const uint8_t *packed,
                                  int64_t bytes, PutInts *put_ints)
{
    const Feature *feature = &job->plan->features[i];
    const Output *output = &job->outputs[i];
    int64_t first, capacity, count = 0;
    if (!row_places(feature, output, row, &first, &capacity))
        return 0;
    char *to = (char *)output->values + (size_t)first * output->item;
    if (feature->kind == INTS && output->item == 8)
        count = put_ints(packed, bytes, to, capacity, output->room - first, 0);
    else if (feature->kind == INTS && output->item == 4)
        count = put_ints(packed, bytes, to, capacity, output->room - first, 1);
    else if (feature->kind == FLOATS)
        count = put_floats(packed, bytes, to, capacity);
    else if (feature->kind == BYTES)
        count = put_bytes(packed, bytes, to, capacity);
    else
        return 0;
    if (count == capacity)
        return 1;
    if (count < 0 || feature->width != RAGGED)
        return 0;
    fill(output, first + count, capacity - count);
    return 1;
}

static ALWAYS_INLINE int measure_list(const Job *job, int64_t row, int64_t i,
                                      const uint8_t *packed, int64_t bytes)
{
    const Feature *feature = &job->plan->features[i];
    int64_t count = bytes;
    if (feature->kind == INTS) {
        Look look = look_at(packed, bytes, unfinished_plain);
        count = look.over_10 == 0 ? look.count : -1;
    } else if (feature->kind == FLOATS) {
        count = bytes % 4 == 0 ? bytes >> 2 : -1;
    }
    if (feature->width != RAGGED)
        return count == feature->width;
    job->lengths[feature->ragged * job->rows + row] = count;
    return count >= 0;
}

/* A length of up to four bytes, all of which may be read; a longer one comes out too large. */
static ALWAYS_INLINE int64_t read_length(const uint8_t **at)
{
    /* Nothing could predict whether it has one byte or two. */
    uint32_t bytes = load_4(*at), more = bytes >> 7 & 1;
    int64_t length = (bytes & 127) | (bytes >> 1 & 0x3F80 & (0 - more));
    *at += 1 + more;
    if ((bytes & 0x8080) != 0x8080)
        return length;
    length |= (bytes >> 2 & 0x1FC000) | (bytes & 0x800000 ? bytes >> 3 & 0xFE00000 : 0);
    *at += bytes & 0x800000 ? 2 : 1;
    return (bytes & 0x80800000) == 0x80800000 ? INT64_MAX : length;
}

/* Whether a field with this tag fills everything up to `end`. Moves `at` behind its length. */
static ALWAYS_INLINE int fills(const uint8_t **at, const uint8_t *end, uint32_t tag)
{
    /* Only one length does, so there is nothing to decode. */
    int64_t length = end - *at - 2;
    uint32_t found = load_4(*at);
    if (length < 128) {
        *at += 2;
        return (found & 0xFFFF) == (tag | (uint32_t)length << 8);
    }
    length--;
    if (length < 128 * 128) {
        *at += 3;
        return (found & 0xFFFFFF) ==
               (tag | 0x8000 | (uint32_t)(length & 127) << 8 | (uint32_t)(length >> 7) << 16);
    }
    (*at)++;
    return (found & 0xFF) == tag && read_length(at) == end - *at;
}

/* An entry of the map, which fills everything up to `end`. Which feature it is, INT32_MAX if none
   that is looked for, or -1 if it has to be read the exact way. Moves `at` to the Feature. */
static ALWAYS_INLINE int32_t fast_entry(const Job *job, const uint8_t **at, const uint8_t *end,
                                        int32_t guess)
{
    const Feature *feature = &job->plan->features[guess];
    int32_t found = guess;
    if (feature->key_bytes > 0 && is_same(*at, feature->name - KEY_HEAD, feature->key_bytes, 1)) {
        *at += feature->key_bytes;
    } else {
        uint8_t tag = *(const volatile uint8_t *)(*at)++;
        int64_t bytes = read_length(at);
        const uint8_t *name = *at;
        if (tag != TAG(1) || bytes > end - name)
            return -1;
        found = find_name(job->plan, name, bytes, 1);
        *at += bytes;
    }
    if (!fills(at, end, TAG(2)))
        return -1;
    return found < 0 ? INT32_MAX : found;
}

static ALWAYS_INLINE int fast_list(const Job *job, int64_t row, int64_t i, const uint8_t *at,
                                   const uint8_t *end, PutInts *put_ints)
{
    if (!fills(&at, end, TAG((uint32_t)job->plan->features[i].kind)))
        return 0;
    if (at != end && !fills(&at, end, TAG(1)))
        return 0;
    return job->outputs == NULL ? measure_list(job, row, i, at, end - at)
                                : put_list(job, row, i, at, end - at, put_ints);
}

/* What to do about features that a record lacks. */
static int fast_missing(const Job *job, int64_t row)
{
    for (int64_t i = 0; i < job->plan->count; i++) {
        const Feature *feature = &job->plan->features[i];
        int64_t first, capacity;
        if (job->memory[i].row == row)
            continue;
        if (feature->required)
            return 0;
        if (job->outputs == NULL) {
            if (feature->width == RAGGED)
                job->lengths[feature->ragged * job->rows + row] = 0;
        } else if (row_places(feature, &job->outputs[i], row, &first, &capacity)) {
            fill(&job->outputs[i], first, capacity);
        } else {
            return 0;
        }
    }
    return 1;
}

/* 1 if the record was read; else whatever was written has to be written again. */
static ALWAYS_INLINE int fast_row(const Job *job, int64_t row, int64_t start, int64_t stop,
                                  PutInts *put_ints, Crc *crc)
{
    const uint8_t *at = job->text + start, *end = job->text + stop;
    int64_t wrong, found = 0, count = job->plan->count;
    int32_t before = (int32_t)count;
    if (job->bytes - stop < BEYOND || start == stop || !fills(&at, end, TAG(1)))
        return 0;
    if (job->check && check_frame(job, start, stop, crc, &wrong) != GOOD)
        return 0;
    while (at < end) {
        uint8_t tag = *(const volatile uint8_t *)at++;
        int64_t bytes = read_length(&at);
        if (tag != TAG(1) || bytes > end - at)
            return 0;
        const uint8_t *next = at + bytes;
        int32_t i = fast_entry(job, &at, next, job->memory[before].after);
        if (i >= 0 && i < count) {
            Memory *memory = &job->memory[i];
            if (memory->row == row || !fast_list(job, row, i, at, next, put_ints))
                return 0;
            memory->row = row;
            job->memory[before].after = i;
            before = i;
            found++;
        } else if (i < 0) {
            return 0;
        }
        at = next;
    }
    return found == count || fast_missing(job, row);
}

/* ---- all rows ---- */

/* How many rows are bad. */
static ALWAYS_INLINE int64_t decode_rows(const Job *job, PutInts *put_ints, Crc *crc, int is_exact)
{
    const Job copy = *job; /* which no store can change: the loops need not look again */
    int64_t bad = 0;
    for (int64_t i = 0; i <= copy.plan->count; i++)
        copy.memory[i] = (Memory){.row = -1};
    for (int64_t row = 0; row < copy.rows; row++) {
        int64_t start = read_once(copy.starts, row), stop = read_once(copy.ends, row), wrong = start;
        int code = GOOD, is_inside = start >= 0 && stop >= start && stop <= copy.bytes;
        fetch_ahead(copy.text, copy.starts, copy.ends, copy.rows, row, HEADER);
        if (is_exact || !is_inside || !fast_row(&copy, row, start, stop, put_ints, crc))
            code = exact_row(&copy, row, start, stop, &wrong);
        copy.status[row] = (uint8_t)code;
        if (code != GOOD) {
            copy.at[row] = wrong;
            zero_row(&copy, row);
            bad++;
        }
    }
    return bad;
}

static int64_t decode_plain(const Job *job)
{
    return decode_rows(job, put_ints_plain, crc_best, 0);
}

#ifdef __x86_64__

/* Inline, so that its instructions are encoded as those around it: mixing them costs much. */
WIDER static ALWAYS_INLINE uint32_t crc_wide(uint32_t state, const uint8_t *data, int64_t bytes)
{
    return crc_padded(state, data, bytes);
}

WIDER static int64_t decode_wide(const Job *job)
{
    return decode_rows(job, put_ints_wide, crc_wide, 0);
}

#endif

/* Decodes or measures all rows by the fastest way that this machine has. Returns how many are
   bad. */
static int64_t (*example_decode)(const Job *job);

/* Before anything else here, once. */
static void example_prepare(void)
{
    crc_prepare();
    example_decode = decode_plain;
#ifdef __x86_64__
    steps_prepare();
    if (is_wide() && crc_runs_sse42())
        example_decode = decode_wide;
#endif
}

#endif

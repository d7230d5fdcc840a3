/* Records of TFRecord that hold tf.train.Example messages; without Python.

   A record is read twice. The fast way expects what every writer of today writes: map entries of a
   key and a value in that order, lists packed, nothing unknown. It gives up on anything else. Then
   the exact way, which reads whatever Protocol Buffers allow, decodes the record again from left
   to right and says what is wrong, and where. The text may be changed by others meanwhile: every
   access is bounded by the record, whatever stands there. */

#ifndef FLATOUT_EXAMPLE_CORE_H
#define FLATOUT_EXAMPLE_CORE_H

#include <limits.h>
#include <stdlib.h>

#include "_example_crc.h"

/* What is wrong with a record: `Bad` in example.py. */
enum {
    GOOD,
    OUTSIDE,
    LENGTH_CRC,
    LENGTH_DIFFERS,
    DATA_CRC,
    TRUNCATED,
    BAD_TAG,
    VARINT_TOO_LONG,
    WRONG_KIND,
    MISSING,
    WRONG_COUNT,
    INT32_OVERFLOW,
    SEVERAL_VALUES
};

/* How a scan ended: `End` in example.py. */
enum {
    END_WHOLE,
    END_FULL,
    END_HEADER,
    END_LENGTH_CRC,
    END_LENGTH_TOO_LARGE,
    END_DATA,
};

/* Numbers of the fields of Feature's oneof. */
typedef enum { BYTES = 1, FLOATS = 2, INTS = 3 } Kind;

#define RAGGED (-1)

typedef struct {
    const uint8_t *name; /* behind the tag and the length that a record has before it */
    int64_t name_bytes;
    int64_t key_bytes; /* of all three; 0 for a name that is too long for this */
    Kind kind;
    int64_t width; /* values in each row, or RAGGED */
    int required;
    int is_int32;   /* larger values are refused, whatever they are written to */
    int64_t ragged; /* which of the ragged ones */
} Feature;

/* What is looked for in records. It does not change, so that threads may share it. */
typedef struct {
    Feature *features;
    int64_t count, ragged;
    int32_t *slots; /* features by the hash of their names; -1: none */
    uint64_t slot_mask;
} Plan;

/* Where the values of one feature go. */
typedef struct {
    void *values;
    int64_t room;           /* values it can hold */
    const int64_t *offsets; /* of the rows, if ragged */
    size_t item;            /* bytes of a value: 1, 4 or 8 */
    uint64_t fill;          /* bits of what a missing value becomes */
} Output;

typedef struct {
    const uint8_t *at, *end;
} Part;

/* Per feature, for one call; one more than there are features. */
typedef struct {
    int64_t row;   /* the last one where the feature was found */
    int32_t after; /* the feature that came after it; the last place is for the first feature */
    Part entry;    /* of the map, in that row */
} Memory;

typedef struct {
    const uint8_t *text;
    int64_t bytes;
    const int64_t *starts, *ends;
    int64_t rows;
    int check;
    const Plan *plan;
    const Output *outputs; /* NULL: only lengths are measured */
    int64_t *lengths;      /* [ragged][rows] */
    uint8_t *present;      /* [rows][count] or NULL */
    uint8_t *status;
    int64_t *at;
    Memory *memory;
} Job;

/* Of a frame: the length and its checksum stand before the data, the data's checksum behind. */
#define HEADER 12
#define FOOTER 4

/* The fast way reads this far beyond a record. */
#define BEYOND 160
/* Records that are fetched before their turn. */
#define ROWS_AHEAD 4
#define PAGES_AT_ONCE 8
#define ROW_FETCH 512

/* The numbers of the wire format. */
enum { WIRE_VARINT, WIRE_8_BYTES, WIRE_BYTES, WIRE_GROUP, WIRE_END_GROUP, WIRE_4_BYTES };
#define TAG(number) ((number) << 3 | WIRE_BYTES)
/* Tag and length before a name. */
#define KEY_HEAD 2

#define EACH_BYTE(x) (0x0101010101010101u * (uint64_t)(x))

static inline int64_t once(const int64_t *numbers, int64_t i)
{
    return ((const volatile int64_t *)numbers)[i];
}

static ALWAYS_INLINE uint32_t load_4(const uint8_t *bytes)
{
    uint32_t word;
    memcpy(&word, bytes, 4);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word;
}

/* ---- frames ---- */

typedef struct {
    const uint8_t *text;
    int64_t at, stop;
    int64_t *starts, *ends;
    int64_t count, room;
} Frames;

/* Find records from `at` on, until an END_... is reached; `at` is then where the next frame begins. */
static int frames_scan(Frames *frames)
{
    for (;;) {
        int64_t left = frames->stop - frames->at;
        const uint8_t *frame = frames->text + frames->at;
        if (left == 0)
            return END_WHOLE;
        if (frames->count == frames->room)
            return END_FULL;
        if (left < HEADER)
            return END_HEADER;
        uint8_t header[HEADER];
        memcpy(header, frame, HEADER);
        if (crc_masked(crc_best(UINT32_MAX, header, 8)) != load_4(header + 8))
            return END_LENGTH_CRC;
        uint64_t length = load_8(header);
        if (length > (uint64_t)(INT64_MAX - HEADER - FOOTER))
            return END_LENGTH_TOO_LARGE;
        if ((int64_t)length > left - HEADER - FOOTER)
            return END_DATA;
        frames->starts[frames->count] = frames->at + HEADER;
        frames->ends[frames->count] = frames->at + HEADER + (int64_t)length;
        frames->at += HEADER + (int64_t)length + FOOTER;
        frames->count++;
    }
}

/* GOOD if both checksums and the length of the frame around a record are right. */
static ALWAYS_INLINE int check_frame(const Job *job, int64_t start, int64_t stop, Crc *crc,
                                     int64_t *wrong)
{
    const uint8_t *record = job->text + start;
    *wrong = start;
    if (start < HEADER || job->bytes - stop < FOOTER)
        return OUTSIDE;
    *wrong = start - HEADER;
    if (crc_masked(crc(UINT32_MAX, record - HEADER, 8)) != load_4(record - 4))
        return LENGTH_CRC;
    if (load_8(record - HEADER) != (uint64_t)(stop - start))
        return LENGTH_DIFFERS;
    *wrong = start;
    return crc_masked(crc(UINT32_MAX, record, stop - start)) == load_4(record + stop - start)
               ? GOOD
               : DATA_CRC;
}

/* ---- names ---- */

/* The next 8 bytes of a name, or fewer and zeros. `is_padded`: 8 may be read. */
static ALWAYS_INLINE uint64_t name_word(const uint8_t *name, int64_t bytes, int is_padded)
{
    uint64_t word = 0;
    if (bytes >= 8)
        return load_8(name);
    if (is_padded)
        return load_8(name) << (64 - 8 * bytes);
    for (int64_t i = 0; i < bytes; i++)
        word |= (uint64_t)name[i] << (64 - 8 * bytes + 8 * i);
    return word;
}

static ALWAYS_INLINE int is_same(const uint8_t *a, const uint8_t *b, int64_t bytes, int is_padded)
{
    for (int64_t i = 0; i < bytes; i += 8)
        if (name_word(a + i, bytes - i, is_padded) != name_word(b + i, bytes - i, 1))
            return 0;
    return 1;
}

static ALWAYS_INLINE uint64_t name_hash(const uint8_t *name, int64_t bytes, int is_padded)
{
    uint64_t hash = (uint64_t)bytes;
    for (int64_t i = 0; i < bytes; i += 8) {
        hash = (hash ^ name_word(name + i, bytes - i, is_padded)) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

/* The feature of that name, or -1. */
static ALWAYS_INLINE int32_t find_name(const Plan *plan, const uint8_t *name, int64_t bytes,
                                       int is_padded)
{
    uint64_t slot = name_hash(name, bytes, is_padded);
    for (;; slot++) {
        int32_t found = plan->slots[slot & plan->slot_mask];
        if (found < 0 || (plan->features[found].name_bytes == bytes &&
                          is_same(name, plan->features[found].name, bytes, is_padded)))
            return found;
    }
}

static void plan_free(Plan *plan)
{
    if (plan == NULL)
        return;
    for (int64_t i = 0; plan->features != NULL && i < plan->count; i++)
        if (plan->features[i].name != NULL)
            free((void *)(plan->features[i].name - KEY_HEAD));
    free(plan->features);
    free(plan->slots);
    free(plan);
}

/* A plan of features that have no name yet, or NULL without memory. */
static Plan *plan_new(int64_t count)
{
    Plan *plan = calloc(1, sizeof *plan);
    uint64_t slots = 4;
    if (plan == NULL)
        return NULL;
    while (slots < 2 * (uint64_t)count)
        slots *= 2;
    plan->count = count;
    plan->slot_mask = slots - 1;
    plan->features = calloc((size_t)count + 1, sizeof *plan->features);
    plan->slots = malloc(slots * sizeof *plan->slots);
    if (plan->features == NULL || plan->slots == NULL) {
        plan_free(plan);
        return NULL;
    }
    memset(plan->slots, -1, slots * sizeof *plan->slots);
    return plan;
}

/* Give feature `i`, whose other fields are set, its name. 0 without memory, -1 if another has it. */
static int plan_name(Plan *plan, int32_t i, const uint8_t *name, int64_t bytes)
{
    Feature *feature = &plan->features[i];
    uint8_t *copy = calloc(KEY_HEAD + (size_t)bytes + 8, 1); /* for reading words */
    if (copy == NULL)
        return 0;
    copy[0] = TAG(1);
    copy[1] = (uint8_t)bytes;
    memcpy(copy + KEY_HEAD, name, (size_t)bytes);
    feature->name = copy + KEY_HEAD;
    feature->name_bytes = bytes;
    feature->key_bytes = bytes < 128 ? KEY_HEAD + bytes : 0;
    if (feature->width == RAGGED)
        feature->ragged = plan->ragged++;
    if (find_name(plan, feature->name, bytes, 1) >= 0)
        return -1;
    uint64_t slot = name_hash(feature->name, bytes, 1);
    while (plan->slots[slot & plan->slot_mask] >= 0)
        slot++;
    plan->slots[slot & plan->slot_mask] = i;
    return 1;
}

/* ---- rows of the outputs ---- */

/* The places of a row's values. 0 if someone has spoilt the offsets meanwhile. */
static ALWAYS_INLINE int row_places(const Feature *feature, const Output *output, int64_t row,
                                    int64_t *first, int64_t *capacity)
{
    if (feature->width != RAGGED) {
        *first = row * feature->width;
        *capacity = feature->width;
        return 1;
    }
    int64_t stop = once(output->offsets, row + 1);
    *first = once(output->offsets, row);
    *capacity = stop - *first;
    return *first >= 0 && stop >= *first && stop <= output->room;
}

static ALWAYS_INLINE void put_bits(const Output *output, int64_t place, uint64_t bits)
{
    if (output->item == 8) {
        ((uint64_t *)output->values)[place] = bits;
    } else if (output->item == 4) {
        uint32_t half = (uint32_t)bits;
        memcpy((uint32_t *)output->values + place, &half, 4);
    } else {
        ((uint8_t *)output->values)[place] = (uint8_t)bits;
    }
}

static ALWAYS_INLINE void fill(const Output *output, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        put_bits(output, first + i, output->fill);
}

static void zero_row(const Job *job, int64_t row)
{
    const Plan *plan = job->plan;
    for (int64_t i = 0; i < plan->count; i++) {
        const Feature *feature = &plan->features[i];
        int64_t first, capacity;
        if (job->outputs == NULL) {
            if (feature->width == RAGGED)
                job->lengths[feature->ragged * job->rows + row] = 0;
        } else if (row_places(feature, &job->outputs[i], row, &first, &capacity) && capacity > 0) {
            size_t item = job->outputs[i].item;
            memset((char *)job->outputs[i].values + (size_t)first * item, 0, (size_t)capacity * item);
        }
    }
    if (job->present != NULL)
        memset(job->present + row * plan->count, 0, (size_t)plan->count);
}

/* ---- the exact way ---- */

/* Of tags and lengths, and of values. */
#define SHORT_VARINT 5
#define LONG_VARINT 10

typedef struct {
    uint64_t number;
    int wire;
    Part part;      /* the value's bytes: behind the length, if it has one */
    uint64_t value; /* of a varint */
} Field;

/* Moves `part` behind the varint; where something is wrong it stays before it. */
static int read_varint(Part *part, int most, uint64_t *value)
{
    *value = 0;
    for (int i = 0; i < most; i++) {
        if (part->at + i >= part->end)
            return TRUNCATED;
        uint8_t byte = *(const volatile uint8_t *)(part->at + i);
        *value |= (uint64_t)(byte & 127) << 7 * i;
        if (byte < 128) {
            part->at += i + 1;
            return GOOD;
        }
    }
    return VARINT_TOO_LONG;
}

/* The next field; moves `part` behind it, or to what is wrong. */
static int read_field(Part *part, Field *field)
{
    const uint8_t *begin = part->at;
    uint64_t tag, length;
    int code = read_varint(part, SHORT_VARINT, &tag);
    if (code != GOOD)
        return code;
    field->number = tag >> 3;
    field->wire = (int)(tag & 7);
    if (field->number == 0 || tag > UINT32_MAX || field->wire == WIRE_GROUP ||
        field->wire == WIRE_END_GROUP || field->wire > WIRE_4_BYTES) {
        part->at = begin;
        return BAD_TAG;
    }
    field->part.at = part->at;
    if (field->wire == WIRE_VARINT) {
        code = read_varint(part, LONG_VARINT, &field->value);
        field->part.end = part->at;
        return code;
    }
    length = field->wire == WIRE_8_BYTES ? 8 : 4;
    if (field->wire == WIRE_BYTES)
        code = read_varint(part, SHORT_VARINT, &length);
    if (code != GOOD)
        return code;
    if (length > (uint64_t)(part->end - part->at)) {
        part->at = field->part.at;
        return TRUNCATED;
    }
    field->part.at = part->at;
    part->at += length;
    field->part.end = part->at;
    return GOOD;
}

static int is_message(const Field *field, uint64_t number)
{
    return field->number == number && field->wire == WIRE_BYTES;
}

/* An entry of the map: which feature it is, if it is one that is looked for. */
static int read_entry(const Job *job, int64_t row, Part entry, Part *wrong)
{
    Part part = entry, name = {entry.at, entry.at};
    while (part.at < part.end) {
        Field field;
        int code = read_field(&part, &field);
        if (code != GOOD) {
            *wrong = part;
            return code;
        }
        if (is_message(&field, 1))
            name = field.part;
    }
    int32_t found = find_name(job->plan, name.at, name.end - name.at, 0);
    if (found >= 0) {
        job->memory[found].row = row;
        job->memory[found].entry = entry;
    }
    return GOOD;
}

/* Of several entries with the same key the last one counts; several `features` are one. */
static int read_entries(const Job *job, int64_t row, Part record, Part *wrong)
{
    int code = GOOD;
    while (code == GOOD && record.at < record.end) {
        Field features;
        code = read_field(&record, &features);
        *wrong = record;
        if (code != GOOD || !is_message(&features, 1))
            continue;
        while (code == GOOD && features.part.at < features.part.end) {
            Field entry;
            code = read_field(&features.part, &entry);
            *wrong = features.part;
            if (code == GOOD && is_message(&entry, 1))
                code = read_entry(job, row, entry.part, wrong);
        }
    }
    return code;
}

/* The values of one feature in one row, as they are found. */
typedef struct {
    const Feature *feature;
    const Output *output; /* NULL: only counted */
    int64_t first, capacity, count;
    int64_t lists; /* of bytes: how many values, all of which are in `count` */
    int is_int32;
    Part wrong;
} Values;

static void put_value(Values *values, uint64_t bits)
{
    if (values->output != NULL && values->count < values->capacity)
        put_bits(values->output, values->first + values->count, bits);
    values->count++;
}

static int put_int(Values *values, uint64_t bits, const uint8_t *at)
{
    int64_t value = (int64_t)bits;
    if (values->is_int32 && (value < INT32_MIN || value > INT32_MAX)) {
        values->wrong.at = at;
        return INT32_OVERFLOW;
    }
    put_value(values, bits);
    return GOOD;
}

/* One field of an Int64List, FloatList or BytesList. */
static int put_field(Values *values, Field *field)
{
    Kind kind = values->feature->kind;
    Part part = field->part;
    int code = GOOD;
    if (field->number != 1)
        return GOOD;
    if (kind == INTS && field->wire == WIRE_VARINT)
        return put_int(values, field->value, part.at);
    if (kind == FLOATS && field->wire == WIRE_4_BYTES) {
        put_value(values, load_4(part.at));
        return GOOD;
    }
    if (field->wire != WIRE_BYTES)
        return GOOD;
    values->wrong = part;
    if (kind == FLOATS && (part.end - part.at) % 4 != 0)
        return TRUNCATED;
    values->lists++;
    while (code == GOOD && part.at < part.end) {
        const uint8_t *at = part.at;
        uint64_t bits;
        if (kind == INTS) {
            code = read_varint(&part, LONG_VARINT, &bits);
            values->wrong = part;
            if (code == GOOD)
                code = put_int(values, bits, at);
        } else {
            put_value(values, kind == FLOATS ? load_4(at) : *at);
            part.at += kind == FLOATS ? 4 : 1;
        }
    }
    return code;
}

/* Goes through the lists in an entry's Features. Without `values` it only tells the kind of the
   last list, and which one begins the run of that kind that ends there: as everywhere in a oneof, a
   list of another kind drops what was there before. */
static int read_lists(Part entry, Values *values, int64_t *first, Kind *kind, Part *wrong)
{
    int64_t list = 0;
    int code = GOOD;
    while (code == GOOD && entry.at < entry.end) {
        Field feature;
        code = read_field(&entry, &feature);
        *wrong = entry;
        if (code != GOOD || !is_message(&feature, 2))
            continue;
        while (code == GOOD && feature.part.at < feature.part.end) {
            Field field;
            code = read_field(&feature.part, &field);
            *wrong = feature.part;
            if (code != GOOD || field.wire != WIRE_BYTES || field.number > INTS)
                continue;
            if (values == NULL && (Kind)field.number != *kind) {
                *kind = (Kind)field.number;
                *first = list;
            }
            int is_wanted = values != NULL && list >= *first;
            list++;
            while (code == GOOD && is_wanted && field.part.at < field.part.end) {
                Field value;
                code = read_field(&field.part, &value);
                *wrong = field.part;
                if (code == GOOD) {
                    code = put_field(values, &value);
                    *wrong = values->wrong;
                }
            }
        }
    }
    return code;
}

static int check_count(const Values *values)
{
    const Feature *feature = values->feature;
    if (feature->kind == BYTES && values->lists > 1)
        return SEVERAL_VALUES;
    if (feature->width != RAGGED)
        return values->count == feature->width ? GOOD : WRONG_COUNT;
    return values->output == NULL || values->count <= values->capacity ? GOOD : WRONG_COUNT;
}

/* One feature of a row into its output, or its length. */
static int exact_feature(const Job *job, int64_t row, int64_t i, Part *wrong)
{
    Values values = {.feature = &job->plan->features[i]};
    const Feature *feature = values.feature;
    const Memory *memory = &job->memory[i];
    int64_t first = 0;
    Kind kind = 0;
    int code;
    values.is_int32 = feature->kind == INTS && feature->is_int32;
    if (job->outputs != NULL) {
        values.output = &job->outputs[i];
        values.is_int32 |= feature->kind == INTS && values.output->item == 4;
        if (!row_places(feature, values.output, row, &values.first, &values.capacity))
            return OUTSIDE;
    }
    if (memory->row == row) {
        code = read_lists(memory->entry, NULL, &first, &kind, wrong);
        if (code != GOOD)
            return code;
    }
    if (kind == 0 && feature->required)
        return MISSING;
    if (kind != 0) {
        wrong->at = memory->entry.at;
        if (kind != feature->kind)
            return WRONG_KIND;
        code = read_lists(memory->entry, &values, &first, &kind, wrong);
        if (code != GOOD)
            return code;
        wrong->at = memory->entry.at;
        code = check_count(&values);
        if (code != GOOD)
            return code;
    }
    if (job->present != NULL)
        job->present[row * job->plan->count + i] = kind != 0;
    if (job->outputs != NULL)
        fill(values.output, values.first + values.count, values.capacity - values.count);
    else if (feature->width == RAGGED)
        job->lengths[feature->ragged * job->rows + row] = values.count;
    return GOOD;
}

static __attribute__((noinline)) int exact_row(const Job *job, int64_t row, int64_t start, int64_t stop, int64_t *at)
{
    *at = start;
    if (start < 0 || stop < start || stop > job->bytes)
        return OUTSIDE;
    int code = job->check ? check_frame(job, start, stop, crc_best, at) : GOOD;
    if (code != GOOD)
        return code;
    Part record = {job->text + start, job->text + stop}, wrong = record;
    for (int64_t i = 0; i < job->plan->count; i++)
        job->memory[i].row = -1;
    code = read_entries(job, row, record, &wrong);
    for (int64_t i = 0; code == GOOD && i < job->plan->count; i++) {
        wrong = record;
        code = exact_feature(job, row, i, &wrong);
    }
    *at = wrong.at - job->text;
    return code;
}

/* ---- the fast way: numbers ---- */

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
    uint64_t over_3, over_4, over_8; /* not 0: there are varints of more bytes */
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
        /* Bits that end a run of two, three, four or eight, which may have begun in the last block. */
        uint64_t two = one & (one << 1 | ones >> 63);
        uint64_t four = two & (two << 2 | twos >> 62);
        look.over_3 |= two & (one << 2 | ones >> 62);
        look.over_4 |= four;
        look.over_8 |= four & (four << 4 | fours >> 60);
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

#define WIDE __attribute__((target("avx2,bmi,bmi2,popcnt,sse4.2,pclmul")))

/* Four varints of up to three bytes each are found in sixteen bytes by which of the first twelve are
   unfinished: Plaisance, Kurz and Lemire, "Vectorized VByte decoding", 2015. */
#define STEP_BITS 12
#define STEPS_AT_ONCE 5
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

WIDE static ALWAYS_INLINE uint64_t unfinished_wide(const uint8_t *bytes)
{
    int low = _mm256_movemask_epi8(_mm256_loadu_si256((const __m256i *)bytes));
    int high = _mm256_movemask_epi8(_mm256_loadu_si256((const __m256i *)(bytes + 32)));
    return (uint64_t)(uint32_t)high << 32 | (uint32_t)low;
}

/* Four lanes of four bytes, seven bits of each. */
WIDE static ALWAYS_INLINE __m128i four_ints(const uint8_t *packed, const uint8_t *shuffle)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)packed);
    bytes = _mm_shuffle_epi8(bytes, _mm_loadu_si128((const __m128i *)shuffle));
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(0x7F));
    __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi16((short)0x8001), bytes);
    return _mm_madd_epi16(pairs, _mm_set1_epi32(1 << 30 | 1));
}

/* Varints of up to three bytes, in steps of four. The last step also writes what stands behind. */
WIDE static ALWAYS_INLINE int put_ints_of_3(const uint8_t *packed, int64_t bytes, void *to,
                                            int64_t count, int is_int32)
{
    int64_t at = 0, done = 0;
    while (done < count && at < bytes) {
        uint64_t mask = unfinished_wide(packed + at), last = ~mask;
        int64_t begin = at;
        for (int i = 0; i < STEPS_AT_ONCE && done < count; i++, done += 4) {
            unsigned next = (unsigned)(mask >> ((begin - at) & 63)) & ((1 << STEP_BITS) - 1);
            __m128i four = four_ints(packed + begin, shuffles + steps[next]);
            if (is_int32)
                _mm_storeu_si128((__m128i *)((int32_t *)to + done), four);
            else
                _mm256_storeu_si256((__m256i *)((int64_t *)to + done), _mm256_cvtepu32_epi64(four));
            /* Behind the fourth, eighth ... last byte of a varint: no step waits for another one. */
            begin = at + (int64_t)_tzcnt_u64(_pdep_u64((uint64_t)8 << 4 * i, last)) + 1;
        }
        at = begin;
    }
    return done >= count;
}

/* Varints of up to eight bytes. */
WIDE static ALWAYS_INLINE int put_ints_of_8(const uint8_t *packed, int64_t bytes, void *to,
                                            int64_t count, int is_int32)
{
    int64_t begin = 0, done = 0;
    for (int64_t block = 0; block < bytes; block += 64) {
        uint64_t last = ~unfinished_wide(packed + block);
        if (bytes - block < 64)
            last = _bzhi_u64(last, (unsigned)(bytes - block));
        for (; last != 0 && done < count; last = _blsr_u64(last), done++) {
            int64_t next = block + (int64_t)_tzcnt_u64(last) + 1;
            uint64_t value = _pext_u64(load_8(packed + begin), EACH_BYTE(0x7F));
            value = _bzhi_u64(value, (unsigned)(7 * (next - begin)));
            begin = next;
            if (is_int32 && value > INT32_MAX)
                return 0;
            put_number(to, done, value, is_int32);
        }
    }
    return done == count;
}

WIDE static ALWAYS_INLINE int64_t put_ints_wide(const uint8_t *packed, int64_t bytes, void *to,
                                                int64_t capacity, int64_t room, int is_int32)
{
    if (bytes < 4)
        return put_ints_plain(packed, bytes, to, capacity, room, is_int32);
    Look look = look_at(packed, bytes, unfinished_wide);
    int is_good;
    if (look.count > capacity || look.count < 0)
        return -1;
    /* Later rows are written later, so that their room may be used. */
    if (look.over_3 == 0 && room - look.count >= 3)
        is_good = put_ints_of_3(packed, bytes, to, look.count, is_int32);
    else if (look.over_8 == 0)
        is_good = put_ints_of_8(packed, bytes, to, look.count, is_int32);
    else
        return put_ints_plain(packed, bytes, to, capacity, room, is_int32);
    return is_good ? look.count : -1;
}

#endif

/* ---- the fast way: records ---- */

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
    if (feature->kind == INTS && output->item == 8 && !feature->is_int32)
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
        count = (feature->is_int32 ? look.over_4 : look.over_8) == 0 ? look.count : -1;
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
    int64_t length = *(const volatile uint8_t *)(*at)++;
    for (int shift = 7; length >> shift != 0; shift += 7) {
        if (shift > 21)
            return INT64_MAX;
        /* Less one, for the bit that said that there is more. */
        length += ((int64_t)*(const volatile uint8_t *)(*at)++ - 1) << shift;
    }
    return length;
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
        if (job->present != NULL)
            job->present[row * job->plan->count + i] = 0;
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
            if (job->present != NULL)
                job->present[row * count + i] = 1;
        } else if (i < 0) {
            return 0;
        }
        at = next;
    }
    return found == count || fast_missing(job, row);
}

/* ---- all rows ---- */

/* Always inline: gcc takes a call for one without effects, and drops it. */
static ALWAYS_INLINE void fetch(const Job *job, int64_t row)
{
    uintptr_t start = (uintptr_t)job->text + (uintptr_t)once(job->starts, row);
    uintptr_t end = (uintptr_t)job->text + (uintptr_t)once(job->ends, row);
    start -= HEADER;
    end = end - start < ROW_FETCH ? end : start + ROW_FETCH;
    for (start &= ~(uintptr_t)63; start < end; start += 64)
        __builtin_prefetch((const void *)start);
}

/* A fetch waits for the address of its page. Where rows are far apart that takes long, but several
   pages take no longer than one: so the begins of some rows are fetched at once, then row by row
   what follows them. */
static ALWAYS_INLINE void fetch_ahead(const Job *job, int64_t row)
{
    if (row % PAGES_AT_ONCE == 0) {
        int64_t last = row + ROWS_AHEAD + 2 * PAGES_AT_ONCE;
        for (int64_t i = last - PAGES_AT_ONCE; i < last && i < job->rows; i++)
            __builtin_prefetch((const void *)((uintptr_t)job->text + (uintptr_t)once(job->starts, i)));
    }
    if (row + ROWS_AHEAD < job->rows)
        fetch(job, row + ROWS_AHEAD);
}

/* How many rows are bad. */
static ALWAYS_INLINE int64_t decode_rows(const Job *job, PutInts *put_ints, Crc *crc, int is_exact)
{
    const Job copy = *job; /* which no store can change: the loops need not look again */
    int64_t bad = 0;
    for (int64_t i = 0; i <= copy.plan->count; i++)
        copy.memory[i] = (Memory){.row = -1};
    for (int64_t row = 0; row < copy.rows; row++) {
        int64_t start = once(copy.starts, row), stop = once(copy.ends, row), wrong = start;
        int code = GOOD, is_inside = start >= 0 && stop >= start && stop <= copy.bytes;
        fetch_ahead(&copy, row);
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

static int64_t decode_exact(const Job *job)
{
    return decode_rows(job, put_ints_plain, crc_portable, 1);
}

static int64_t decode_plain(const Job *job)
{
    return decode_rows(job, put_ints_plain, crc_best, 0);
}

#ifdef __x86_64__

WIDE static int64_t decode_wide(const Job *job)
{
    return decode_rows(job, put_ints_wide, crc_sse42, 0);
}

static int is_wide(void)
{
    __builtin_cpu_init();
    return crc_best == crc_sse42 && __builtin_cpu_supports("avx2") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt");
}

#endif

/* Decodes or measures `rows` records, by the fastest way that this machine has. Returns how many are
   bad. */
static int64_t (*example_decode)(const Job *job);

/* Before anything else here, once. */
static void example_prepare(void)
{
    crc_prepare();
    example_decode = decode_plain;
#ifdef __x86_64__
    steps_prepare();
    if (is_wide())
        example_decode = decode_wide;
#endif
}

#endif

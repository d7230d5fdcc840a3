/* libFuzzer harness of example/core.h and example/writer.h: no access outside of any buffer, each
   fast way gives what the exact one gives, and what is written is decoded again. Built and run by
   `run`, beside this file. */

#include "example/core.h"
#include "example/writer.h"

#define FEATURES 6
#define MOST_ROWS 64

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            __builtin_trap();                                                                      \
    } while (0)

/* The first bytes of the input. */
typedef struct {
    uint8_t features[FEATURES], room[FEATURES];
    uint8_t form, int32, shift, rows;
    uint8_t changes[4][3]; /* of written records: two for the place, one for the byte */
} Options;

enum { PIECES, RAW, WRITTEN, FORMS }; /* what follows, see below */
enum { PADDED = 4, NO_CHECK = 8, SPOILT = 16 };

/* Memory of exactly this size, so that AddressSanitizer sees the first byte beyond. */
static void *exactly(size_t bytes)
{
    void *memory = malloc(bytes);
    CHECK(memory != NULL);
    memset(memory, 0xA5, bytes);
    return memory;
}

static Plan *plan_of(const Options *options)
{
    /* A name of more than 127 bytes is compared in another way. */
    static char long_name[200];
    const char *names[FEATURES] = {"a", "ids", "", "a feature", "values", long_name};
    memset(long_name, 'n', sizeof long_name - 1);
    static const int64_t widths[] = {RAGGED, RAGGED, 1, 2, 5, 20, 39, 64};
    Plan *plan = plan_new(FEATURES);
    CHECK(plan != NULL);
    for (int32_t i = 0; i < FEATURES; i++) {
        Feature *feature = &plan->features[i];
        feature->kind = (Kind)(1 + options->features[i] % 3);
        feature->width = widths[options->features[i] / 3 % 8];
        feature->required = options->features[i] / 24 % 3 == 0;
        CHECK(plan_name(plan, i, (const uint8_t *)names[i], (int64_t)strlen(names[i])) == 1);
    }
    return plan;
}

/* ---- records, decoded in three ways ---- */

typedef struct {
    const uint8_t *text;
    int64_t bytes;
    int64_t starts[MOST_ROWS], ends[MOST_ROWS];
    int64_t rows;
} Records;

/* The outputs of one call. */
typedef struct {
    Job job;
    Output outputs[FEATURES];
    int64_t *starts, *ends;
} Run;

typedef int64_t Way(const Job *job);

static int64_t exact_way(const Job *job)
{
    return decode_rows(job, put_ints_plain, crc_portable, 1);
}

static Run new_run(const Records *records, const Plan *plan, int check)
{
    Run run = {.job = {.text = records->text, .bytes = records->bytes, .rows = records->rows}};
    size_t rows = (size_t)records->rows;
    run.starts = exactly(rows * sizeof(int64_t));
    run.ends = exactly(rows * sizeof(int64_t));
    memcpy(run.starts, records->starts, rows * sizeof(int64_t));
    memcpy(run.ends, records->ends, rows * sizeof(int64_t));
    run.job.starts = run.starts;
    run.job.ends = run.ends;
    run.job.plan = plan;
    run.job.check = check;
    run.job.status = exactly(rows);
    run.job.at = exactly(rows * sizeof(int64_t));
    run.job.memory = exactly((FEATURES + 1) * sizeof(Memory));
    return run;
}

static void free_run(Run *run)
{
    free(run->starts);
    free(run->ends);
    free(run->job.status);
    free(run->job.at);
    free(run->job.memory);
    free(run->job.lengths);
    for (int i = 0; i < FEATURES; i++)
        free(run->outputs[i].values);
}

static int64_t run_way(Run *run, Way *way)
{
    int64_t bad = way(&run->job), found = 0;
    for (int64_t row = 0; row < run->job.rows; row++) {
        int64_t at = run->job.at[row];
        found += run->job.status[row] != GOOD;
        if (run->job.status[row] == GOOD || run->job.status[row] == OUTSIDE)
            continue;
        CHECK(at >= run->starts[row] - HEADER && at <= run->ends[row]);
    }
    CHECK(bad == found);
    return bad;
}

static void check_same(const Run *a, const Run *b)
{
    size_t rows = (size_t)a->job.rows;
    CHECK(memcmp(a->job.status, b->job.status, rows) == 0);
    CHECK(memcmp(a->job.at, b->job.at, rows * sizeof(int64_t)) == 0);
    if (a->job.lengths != NULL)
        CHECK(memcmp(a->job.lengths, b->job.lengths,
                     (size_t)a->job.plan->ragged * rows * sizeof(int64_t)) == 0);
    for (int i = 0; i < FEATURES && a->job.outputs != NULL; i++)
        CHECK(memcmp(a->outputs[i].values, b->outputs[i].values,
                     (size_t)a->outputs[i].room * a->outputs[i].item) == 0);
}

static Run measured(const Records *records, const Plan *plan, int check, Way *way)
{
    Run run = new_run(records, plan, check);
    run.job.lengths = exactly((size_t)(plan->ragged * records->rows) * sizeof(int64_t));
    run_way(&run, way);
    return run;
}

/* Ragged rows get the room that was measured, and some more or less. */
static int64_t *offsets_of(const Run *measured, const Feature *feature, int8_t more)
{
    int64_t rows = measured->job.rows, *offsets = exactly((size_t)(rows + 1) * sizeof(int64_t));
    offsets[0] = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t room = measured->job.lengths[feature->ragged * rows + row] + (more > 8 ? 0 : more);
        offsets[row + 1] = offsets[row] + (room < 0 ? 0 : room);
    }
    return offsets;
}

static Run decoded(const Records *records, const Plan *plan, int check, const Options *options,
                   int64_t *const *offsets, Way *way)
{
    Run run = new_run(records, plan, check);
    for (int i = 0; i < FEATURES; i++) {
        const Feature *feature = &plan->features[i];
        Output *output = &run.outputs[i];
        output->item = feature->kind == BYTES ? 1 : feature->kind == FLOATS ? 4 : 8;
        if (feature->kind == INTS && (options->int32 >> i & 1))
            output->item = 4;
        output->offsets = offsets[i];
        output->room = records->rows * feature->width;
        if (offsets[i] != NULL)
            output->room = offsets[i][records->rows];
        output->values = exactly((size_t)output->room * output->item);
        output->fill = 0x0102030405060708u * options->rows;
    }
    run.job.outputs = run.outputs;
    run_way(&run, way);
    run.job.outputs = run.outputs; /* of this copy */
    return run;
}

static void check_row(const Run *run, int64_t row, const Column *columns)
{
    for (int i = 0; i < FEATURES; i++) {
        const Feature *feature = &run->job.plan->features[i];
        const Output *output = &run->outputs[i];
        int64_t first, capacity;
        CHECK(row_places(feature, output, row, &first, &capacity));
        int64_t out_item = (int64_t)output->item, is_bad = run->job.status[row] != GOOD;
        for (int64_t j = 0; is_bad && j < capacity * out_item; j++)
            CHECK(((char *)output->values)[first * out_item + j] == 0);
        if (columns == NULL || is_bad)
            continue;
        Sizes sizes;
        CHECK(find_sizes(&columns[i], row, &sizes) && sizes.count <= capacity);
        for (int64_t j = 0; j < sizes.count; j++) {
            char *found = (char *)output->values + (first + j) * out_item;
            size_t item = feature->kind == BYTES ? 1 : feature->kind == FLOATS ? 4 : 8;
            const char *given = (const char *)columns[i].values + (sizes.first + j) * (int64_t)item;
            CHECK(memcmp(found, given, output->item) == 0); /* int32: the lower half */
        }
    }
}

static void fuzz_records(const Records *records, const Plan *plan, const Options *options,
                         const Column *columns)
{
    Way *ways[] = {exact_way, decode_plain, example_decode};
    int check = (options->form & NO_CHECK) == 0;
    Run lengths[3], values[3];
    int64_t *offsets[FEATURES] = {NULL};
    for (int i = 0; i < 3; i++)
        lengths[i] = measured(records, plan, check, ways[i]);
    for (int i = 0; i < FEATURES; i++)
        if (plan->features[i].width == RAGGED)
            offsets[i] = offsets_of(&lengths[0], &plan->features[i], (int8_t)options->room[i]);
    for (int i = 0; i < 3; i++) {
        values[i] = decoded(records, plan, check, options, offsets, ways[i]);
        check_same(&lengths[0], &lengths[i]);
        values[i].job.outputs = values[i].outputs;
        check_same(&values[0], &values[i]);
    }
    for (int64_t row = 0; row < records->rows; row++)
        check_row(&values[0], row, columns);
    for (int i = 0; i < 3; i++) {
        free_run(&lengths[i]);
        free_run(&values[i]);
    }
    for (int i = 0; i < FEATURES; i++)
        free(offsets[i]);
}

/* ---- PIECES: records of a length and its bytes each, which get their frames here ---- */

static void write_frame(uint8_t *record, int64_t bytes)
{
    store_4(record - 12, (uint32_t)bytes);
    store_4(record - 8, 0);
    store_4(record - 4, crc_masked(crc_portable(UINT32_MAX, record - HEADER, 8)));
    store_4(record + bytes, crc_masked(crc_portable(UINT32_MAX, record, bytes)));
}

static void scan_all(Records *records, int64_t room)
{
    int64_t *starts = exactly((size_t)room * sizeof(int64_t));
    int64_t *ends = exactly((size_t)room * sizeof(int64_t));
    Frames frames = {.text = records->text, .stop = records->bytes, .starts = starts, .ends = ends};
    /* Room for a few at a time: it must go on where it stopped. */
    int end = END_FULL;
    for (; end == END_FULL && frames.room < room; frames.room += frames.room + 3 <= room ? 3 : 1)
        end = frames_scan(&frames);
    CHECK(frames.at <= frames.stop && frames.count <= room);
    CHECK((end == END_WHOLE) <= (frames.at == frames.stop));
    records->rows = frames.count;
    memcpy(records->starts, starts, (size_t)frames.count * sizeof(int64_t));
    memcpy(records->ends, ends, (size_t)frames.count * sizeof(int64_t));
    free(starts);
    free(ends);
}

static void fuzz_pieces(const uint8_t *data, int64_t bytes, const Plan *plan,
                        const Options *options)
{
    int64_t padding = options->form & PADDED ? BEYOND : 0, at = 0, rows = 0;
    Records records = {.bytes = 0};
    int64_t sizes[MOST_ROWS], total = 0;
    for (int64_t left = bytes; left > 0 && rows < MOST_ROWS - 1; rows++) {
        int64_t size = data[at] < 200 ? data[at] : 8 * data[at];
        sizes[rows] = size < left - 1 ? size : left - 1;
        at += 1 + sizes[rows];
        left -= 1 + sizes[rows];
        total += HEADER + sizes[rows] + FOOTER;
    }
    uint8_t *text = exactly((size_t)(total + padding)), *to = text;
    for (int64_t row = 0; row < rows; row++) {
        memcpy(to + HEADER, data + 1, (size_t)sizes[row]);
        write_frame(to + HEADER, sizes[row]);
        data += 1 + sizes[row];
        to += HEADER + sizes[row] + FOOTER;
    }
    records.text = text;
    records.bytes = total;
    scan_all(&records, MOST_ROWS);
    CHECK(records.rows == rows);
    records.bytes += padding;
    fuzz_records(&records, plan, options, NULL);
    free(text);
}

/* ---- RAW: a file, and ranges that are no records of it ---- */

static void fuzz_raw(const uint8_t *data, int64_t bytes, const Plan *plan, const Options *options)
{
    const int64_t near = (int8_t)options->shift;
    const int64_t wild[][2] = {{0, bytes},      {near, bytes},   {0, bytes + near}, {12, bytes - 4},
                               {bytes, near}, {INT64_MIN, -1}, {1, INT64_MAX}};
    const int64_t ranges = sizeof wild / sizeof *wild;
    uint8_t *text = exactly((size_t)bytes);
    memcpy(text, data, (size_t)bytes);
    Records records = {.text = text, .bytes = bytes};
    scan_all(&records, MOST_ROWS - ranges);
    for (int64_t i = 0; i < ranges; i++, records.rows++) {
        records.starts[records.rows] = wild[i][0];
        records.ends[records.rows] = wild[i][1];
    }
    fuzz_records(&records, plan, options, NULL);
    free(text);
}

/* ---- WRITTEN: columns of what follows, written and decoded again, as they are or spoiled ---- */

/* The next number of so many bytes, or zeros. */
static uint64_t next_number(const uint8_t **data, int64_t *left, int bytes)
{
    uint64_t number = 0;
    for (int i = 0; i < bytes && *left > 0; i++, (*left)--)
        number |= (uint64_t)*(*data)++ << 8 * i;
    return number;
}

static void column_of(Column *column, const Feature *feature, int64_t rows, const uint8_t **data,
                      int64_t *left)
{
    *column = (Column){feature->name, feature->name_bytes, feature->kind, NULL, 0, feature->width,
                       NULL};
    column->room = rows * feature->width;
    if (feature->width == RAGGED) {
        int64_t *offsets = exactly((size_t)(rows + 1) * sizeof(int64_t));
        offsets[0] = 0;
        for (int64_t row = 0; row < rows; row++)
            offsets[row + 1] = offsets[row] + (int64_t)(next_number(data, left, 1) % 70);
        column->offsets = offsets;
        column->room = offsets[rows];
    }
    size_t item = feature->kind == BYTES ? 1 : feature->kind == FLOATS ? 4 : 8;
    uint8_t *values = exactly((size_t)column->room * item);
    int size = feature->kind == INTS ? 1 + (int)(next_number(data, left, 1) % 8) : (int)item;
    for (int64_t i = 0; i < column->room; i++) {
        uint64_t number = next_number(data, left, size);
        memcpy(values + i * (int64_t)item, &number, item);
    }
    column->values = values;
}

static void spoil(uint8_t *text, const Records *records, const Options *options)
{
    for (int i = 0; i < 4; i++) {
        int64_t place = options->changes[i][0] | options->changes[i][1] << 8;
        if (place < records->bytes)
            text[place] = options->changes[i][2];
    }
    for (int64_t row = 0; row < records->rows && (options->form & SPOILT); row++)
        write_frame(text + records->starts[row], records->ends[row] - records->starts[row]);
}

static void fuzz_written(const uint8_t *data, int64_t bytes, const Plan *plan,
                         const Options *options)
{
    int64_t padding = options->form & PADDED ? BEYOND : 0;
    Column columns[FEATURES];
    Writing job = {.columns = columns, .count = FEATURES, .rows = options->rows % 8};
    for (int i = 0; i < FEATURES; i++)
        column_of(&columns[i], &plan->features[i], job.rows, &data, &bytes);
    job.offsets = exactly((size_t)(job.rows + 1) * sizeof(int64_t));
    CHECK(writer_sizes(&job) == job.rows);
    job.out_bytes = job.offsets[job.rows];
    job.out = exactly((size_t)job.out_bytes);
    CHECK(writer_write(&job) == job.rows);
    uint8_t *text = exactly((size_t)(job.out_bytes + padding));
    memcpy(text, job.out, (size_t)job.out_bytes);
    Records records = {.text = text, .bytes = job.out_bytes};
    scan_all(&records, MOST_ROWS);
    CHECK(records.rows == job.rows);
    records.bytes += padding;
    fuzz_records(&records, plan, options, columns);
    spoil(text, &records, options);
    fuzz_records(&records, plan, options, NULL);
    /* A place that is too small for a row. */
    if (job.rows > 0) {
        job.offsets[job.rows]--;
        CHECK(writer_write(&job) == job.rows - 1);
    }
    for (int i = 0; i < FEATURES; i++) {
        free((void *)columns[i].values);
        free((void *)columns[i].offsets);
    }
    free(job.offsets);
    free(job.out);
    free(text);
}

/* The bytes at once, in two parts, and by tables. */
static void fuzz_crc(const uint8_t *data, int64_t bytes, const Options *options)
{
    int64_t first = bytes * options->shift / 256;
    uint8_t *copy = exactly((size_t)bytes);
    memcpy(copy, data, (size_t)bytes);
    uint32_t state = crc_best(UINT32_MAX, copy, bytes);
    CHECK(state == crc_portable(UINT32_MAX, copy, bytes));
    CHECK(state == crc_best(crc_best(UINT32_MAX, copy, first), copy + first, bytes - first));
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Options options;
    if (size < sizeof options || size > 1 << 16)
        return 0;
    if (example_decode == NULL)
        example_prepare();
    memcpy(&options, data, sizeof options);
    data += sizeof options;
    int64_t bytes = (int64_t)(size - sizeof options);
    Plan *plan = plan_of(&options);
    fuzz_crc(data, bytes, &options);
    switch ((options.form & 3) % FORMS) {
    case PIECES:
        fuzz_pieces(data, bytes, plan, &options);
        break;
    case RAW:
        fuzz_raw(data, bytes, plan, &options);
        break;
    case WRITTEN:
        fuzz_written(data, bytes, plan, &options);
        break;
    }
    plan_free(plan);
    return 0;
}

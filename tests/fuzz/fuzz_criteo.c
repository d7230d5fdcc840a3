/* libFuzzer harness of criteo/core.h and lines/core.h: no access outside of any buffer, and each
   fast way gives what the plain one gives. Built and run by `run`, beside this file. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "criteo/core.h"
#include "lines/core.h"

#define OPTIONS 8
#define WILD 6 /* ranges that are no lines of the text */
#define MOST_ROWS 256

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            __builtin_trap();                                                                      \
    } while (0)

/* Memory of exactly this size, so that AddressSanitizer sees the first byte beyond. */
static void *exactly(size_t bytes)
{
    void *memory = malloc(bytes);
    CHECK(memory != NULL);
    memset(memory, 0xA5, bytes);
    return memory;
}

/* ---- lines ---- */

static Lines lines_of(const uint8_t *text, int64_t size, const uint8_t *options)
{
    Lines lines = {.bytes = text, .stop = size, .skip_blank = options[0] & 1};
    lines.starts = exactly(MOST_ROWS * sizeof(int64_t));
    lines.ends = exactly(MOST_ROWS * sizeof(int64_t));
    if (options[0] & 2) {
        lines.comment = (const uint8_t *)"#!";
        lines.comment_bytes = options[0] & 4 ? 2 : 1;
    }
    lines.white[' '] = lines.white['\r'] = 1;
    lines.white['\t'] = options[0] >> 3 & 1;
    return lines;
}

/* Byte by byte, as one would write it down. */
static void check_lines(const Lines *lines)
{
    int64_t count = 0, start = 0;
    for (int64_t i = 0; i <= lines->stop && count < MOST_ROWS; i++) {
        int is_newline = i < lines->stop && lines->bytes[i] == '\n';
        if (!is_newline && (i < lines->stop || start == i))
            continue;
        int64_t end = i > start && lines->bytes[i - 1] == '\r' ? i - 1 : i, first = start;
        while (first < end && lines->white[lines->bytes[first]])
            first++;
        int is_comment = lines->comment != NULL && first < end &&
                         end - first >= (int64_t)lines->comment_bytes &&
                         memcmp(lines->bytes + first, lines->comment, lines->comment_bytes) == 0;
        if (!is_comment && !(first == end && lines->skip_blank)) {
            CHECK(lines->starts[count] == start && lines->ends[count] == end);
            count++;
        }
        start = i + 1;
    }
    CHECK(count == lines->count);
}

static void fuzz_lines(Lines *lines)
{
    /* Room for a few lines at a time: it must go on where it stopped. */
    for (int64_t room = 0; lines->at < lines->stop && room < MOST_ROWS; room += 3) {
        lines->room = room;
        lines_index(lines);
    }
    lines->room = MOST_ROWS;
    lines_index(lines);
    check_lines(lines);
}

/* ---- rows of Criteo ---- */

typedef struct {
    Criteo job;
    size_t bytes[3]; /* of labels, integers and categories */
} Run;

static Run new_run(const Criteo *job)
{
    Run run = {.job = *job};
    Column *columns[3] = {&run.job.labels, &run.job.integers, &run.job.categories};
    for (int i = 0; i < 3; i++) {
        size_t item = columns[i]->kind == INT64 ? 8 : columns[i]->kind == NOTHING ? 0 : 4;
        run.bytes[i] = (size_t)job->rows * (size_t)columns[i]->width * item;
        columns[i]->values = exactly(run.bytes[i]);
    }
    int64_t fields = job->has_label + job->integers.width + job->categories.width;
    run.job.tabs = exactly((size_t)(fields + SLACK) * sizeof(int32_t));
    run.job.status = exactly((size_t)job->rows);
    run.job.at = exactly((size_t)job->rows * sizeof(int64_t));
    return run;
}

static void free_run(Run *run)
{
    free(run->job.labels.values);
    free(run->job.integers.values);
    free(run->job.categories.values);
    free(run->job.tabs);
    free(run->job.status);
    free(run->job.at);
}

static void check_same(const Run *a, const Run *b)
{
    CHECK(memcmp(a->job.labels.values, b->job.labels.values, a->bytes[0]) == 0);
    CHECK(memcmp(a->job.integers.values, b->job.integers.values, a->bytes[1]) == 0);
    CHECK(memcmp(a->job.categories.values, b->job.categories.values, a->bytes[2]) == 0);
    CHECK(memcmp(a->job.status, b->job.status, (size_t)a->job.rows) == 0);
    CHECK(memcmp(a->job.at, b->job.at, (size_t)a->job.rows * sizeof(int64_t)) == 0);
}

static int never_integers(const Column *column, int64_t place, const uint8_t *text,
                          const int32_t *tabs, int64_t count)
{
    (void)column, (void)place, (void)text, (void)tabs, (void)count;
    return 0;
}

static void fuzz_criteo(const Criteo *job)
{
    Run exact = new_run(job), plain = new_run(job), any = new_run(job);
    int64_t bad = parse_rows(&exact.job, never_integers, put_categories);
    CHECK(criteo_parse(&plain.job, 1) == bad);
    CHECK(criteo_parse(&any.job, 0) == bad);
    check_same(&exact, &plain);
    check_same(&exact, &any);
    for (int64_t i = 0; i < job->rows; i++) {
        if (exact.job.status[i] == GOOD || exact.job.status[i] == OUTSIDE)
            continue;
        CHECK(exact.job.at[i] >= job->starts[i] && exact.job.at[i] <= job->ends[i]);
    }
    free_run(&exact);
    free_run(&plain);
    free_run(&any);
}

static Criteo job_of(const Lines *lines, const uint8_t *options)
{
    static const int64_t buckets[] = {0, 1, 2, 1000, 1 << 20, 0x7FFFFFFF, 0x80000000, 1LL << 40};
    static const Kind kinds[] = {FLOAT32, INT32, INT64, NOTHING};
    Criteo job = {.bytes = lines->stop, .starts = lines->starts, .ends = lines->ends};
    job.rows = lines->count;
    job.has_label = options[1] & 1;
    job.labels = (Column){.width = 1, .kind = job.has_label ? kinds[options[1] >> 1 & 3] : NOTHING};
    job.integers = (Column){.width = options[2] & 15, .kind = kinds[(options[1] >> 3) % 3]};
    job.integers.missing = (int8_t)options[3];
    job.categories = (Column){.width = options[2] >> 4, .kind = kinds[1 + (options[4] & 1)]};
    job.categories.missing = (int8_t)options[3];
    job.hashing = hashing_of(buckets[options[4] >> 1 & (job.categories.kind == INT32 ? 3 : 7)]);
    if (job.has_label + job.integers.width + job.categories.width == 0)
        job.categories.width = 1;
    return job;
}

static void add_wild_ranges(Lines *lines, const uint8_t *options)
{
    const int64_t size = lines->stop, near = (int8_t)options[5];
    const int64_t ranges[WILD][2] = {{0, size},         {near, size},    {0, size + near},
                                     {size, near},      {INT64_MIN, -1}, {1, INT64_MAX}};
    for (int i = 0; i < WILD && lines->count < MOST_ROWS; i++) {
        lines->starts[lines->count] = ranges[i][0];
        lines->ends[lines->count] = ranges[i][1];
        lines->count++;
    }
}

/* ---- rows of bytes ---- */

/* The text as rows of `step` bytes, cut into three columns and put together again. */
static void fuzz_move(const uint8_t *text, int64_t size, const uint8_t *options)
{
    const int64_t step = 1 + options[6], rows = size / step, cut = options[7] % step;
    const int64_t widths[3] = {cut / 2, cut - cut / 2, step - cut};
    int64_t *index = exactly((size_t)rows * sizeof(int64_t));
    uint8_t *columns[3], *joined = exactly((size_t)(rows * step));
    Piece split[3], join[3];
    for (int64_t i = 0; i < rows; i++)
        index[i] = text[i] % rows;
    for (int64_t i = 0, offset = 0; i < 3; offset += widths[i++]) {
        columns[i] = exactly((size_t)(rows * widths[i]));
        split[i] = (Piece){text + offset, columns[i], step, widths[i], widths[i]};
        join[i] = (Piece){columns[i], joined + offset, widths[i], step, widths[i]};
    }
    rows_move(split, 3, index, rows);
    rows_move(join, 3, NULL, rows);
    for (int64_t i = 0; i < rows; i++)
        CHECK(memcmp(joined + i * step, text + index[i] * step, (size_t)step) == 0);
    for (int i = 0; i < 3; i++)
        free(columns[i]);
    free(joined);
    free(index);
}

/* ---- byte ranges of a file ---- */

static void check_read(const Reading *reading, int result, const uint8_t *text, int64_t size)
{
    for (int64_t i = 0; i < reading->row; i++)
        CHECK(memcmp(reading->out + reading->places[i], text + reading->starts[i],
                     (size_t)(reading->ends[i] - reading->starts[i])) == 0);
    if (result == READ_DONE)
        CHECK(reading->row == reading->rows);
    else
        CHECK(result == READ_ENDED && reading->ends[reading->row] > size &&
              reading->at == (reading->starts[reading->row] > size ? reading->starts[reading->row]
                                                                   : size));
}

/* The lines, read from a file that lacks the text's last bytes if the options say so. */
static void fuzz_read(const Lines *lines, const uint8_t *options)
{
    static int fd = -1;
    int64_t size = lines->stop - (options[5] & 15);
    size = size < 0 ? 0 : size;
    if (fd < 0)
        fd = memfd_create("fuzz", 0);
    CHECK(fd >= 0 && ftruncate(fd, 0) == 0);
    CHECK(pwrite(fd, lines->bytes, (size_t)size, 0) == size);
    int64_t *places = exactly((size_t)lines->count * sizeof(int64_t)), bytes = 0;
    for (int64_t i = 0; i < lines->count; i++) {
        places[i] = bytes;
        bytes += lines->ends[i] - lines->starts[i];
    }
    Reading reading = {.fd = fd, .starts = lines->starts, .ends = lines->ends, .places = places};
    reading.out = exactly((size_t)bytes);
    reading.out_bytes = bytes;
    reading.rows = lines->count;
    CHECK(rows_inside(&reading) == reading.rows);
    /* Less room than the last row needs. */
    reading.out_bytes -= bytes > 0;
    CHECK((rows_inside(&reading) < reading.rows) == (bytes > 0));
    reading.out_bytes = bytes;
    check_read(&reading, rows_read(&reading), lines->bytes, size);
    free(reading.out);
    free(places);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < OPTIONS || size > 1 << 20)
        return 0;
    const uint8_t *options = data;
    int64_t bytes = (int64_t)size - OPTIONS;
    /* The fast ways look beyond a row: with as much behind it as they need, and with nothing. */
    int64_t padding = options[7] & 1 ? 0 : BEYOND;
    uint8_t *text = exactly((size_t)(bytes + padding));
    memcpy(text, data + OPTIONS, (size_t)bytes);
    Lines lines = lines_of(text, bytes, options);
    fuzz_lines(&lines);
    if (options[0] >> 7)
        fuzz_read(&lines, options);
    else if (options[0] >> 6 & 1)
        fuzz_move(text, bytes, options);
    add_wild_ranges(&lines, options);
    Criteo job = job_of(&lines, options);
    job.text = text;
    job.bytes = bytes + padding;
    fuzz_criteo(&job);
    free(lines.starts);
    free(lines.ends);
    free(text);
    return 0;
}

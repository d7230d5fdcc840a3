/* libFuzzer harness of _example_core.h and _example_writer.h: no access outside of any buffer, and
   each fast way gives what the exact one gives. Built and run by `run`, beside this file. */

#include "_example_core.h"
#include "_example_writer.h"

#define OPTIONS 24
#define FEATURES 6
#define MOST_ROWS 64

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

/* ---- a plan from the options ---- */

static Plan *plan_of(const uint8_t *options)
{
    static const char *const names[FEATURES] = {
        "a", "ids", "", "a feature", "values",
        "a name of more than 128 bytes, which is compared in another way, and goes on and on and on "
        "and on and on and on and on and on and on",
    };
    static const int64_t widths[] = {RAGGED, RAGGED, 1, 2, 5, 20, 39, 64};
    Plan *plan = plan_new(FEATURES);
    CHECK(plan != NULL);
    for (int32_t i = 0; i < FEATURES; i++) {
        uint8_t option = options[i];
        Feature *feature = &plan->features[i];
        feature->kind = (Kind)(1 + option % 3);
        feature->width = widths[option / 3 % 8];
        feature->required = option / 24 % 3 == 0;
        feature->is_int32 = option / 72 % 3 == 2;
        CHECK(plan_name(plan, i, (const uint8_t *)names[i], (int64_t)strlen(names[i])) == 1);
    }
    CHECK(plan_name(plan, 1, (const uint8_t *)"a", 1) == -1);
    free((void *)(plan->features[1].name - KEY_HEAD));
    plan->ragged -= plan->features[1].width == RAGGED;
    plan_free(plan);
    return NULL;
}

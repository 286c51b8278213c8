// Adam's update of many arrays in one pass over each, on all threads.

#include "pool.h"
#include "vectors.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum { CHUNK = 16384 }; // numbers of a part

// `starts[i]` is the first part of the i-th array, and `starts[count]` the number of all.
typedef struct {
    int count;
    const ptrdiff_t *sizes, *starts;
    const float *const *gradients;
    double *sums;
    const float *const *weights, *const *first, *const *second;
    float *const *new_weights, *const *new_first, *const *new_second;
    const float *kept; // of each array's weights, before the update
    float factor, rate, b1, b2, other1, other2, eps, root;
} Arrays;

static int array_of(const Arrays *a, int part) {
    int low = 0, high = a->count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (a->starts[middle] <= part)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static ptrdiff_t bound(const Arrays *a, int array, int part, ptrdiff_t *from) {
    *from = (part - a->starts[array]) * CHUNK;
    return *from + CHUNK < a->sizes[array] ? *from + CHUNK : a->sizes[array];
}

static void square_part(void *argument, int part, int thread) {
    (void)thread;
    const Arrays *a = argument;
    int array = array_of(a, part);
    ptrdiff_t i, until = bound(a, array, part, &i);
    const float *x = a->gradients[array];
    double total = 0.0;
    while (i < until) { // only short sums are in float32
        vec some = all(0.0f);
        ptrdiff_t end = i + 256 < until ? i + 256 : until;
        for (; i + WIDTH <= end; i += WIDTH)
            some += load(x + i) * load(x + i);
        total += sum(some);
        for (; i < end; i++)
            total += (double)x[i] * x[i];
    }
    a->sums[part] = total;
}

// A function of its own with `restrict` pointers: only for these does the compiler use vector instructions.
static void update(ptrdiff_t size, const float *restrict gradient, const float *restrict weight,
                   const float *restrict first, const float *restrict second, float *restrict new_weight,
                   float *restrict new_first, float *restrict new_second, float kept, const Arrays *a) {
    const float factor = a->factor, rate = a->rate, eps = a->eps, root = a->root;
    const float b1 = a->b1, b2 = a->b2, other1 = a->other1, other2 = a->other2;
    for (ptrdiff_t i = 0; i < size; i++) {
        float g = gradient[i] * factor, m = b1 * first[i] + other1 * g, v = b2 * second[i] + other2 * (g * g);
        new_first[i] = m;
        new_second[i] = v;
        new_weight[i] = weight[i] * kept - rate * m / (sqrtf(v) * root + eps);
    }
}

// Like update, but computes the new weights alone.
static void expect(ptrdiff_t size, const float *restrict gradient, const float *restrict weight,
                   const float *restrict first, const float *restrict second, float *restrict new_weight, float kept,
                   const Arrays *a) {
    const float factor = a->factor, rate = a->rate, eps = a->eps, root = a->root;
    const float b1 = a->b1, b2 = a->b2, other1 = a->other1, other2 = a->other2;
    for (ptrdiff_t i = 0; i < size; i++) {
        float g = gradient[i] * factor, m = b1 * first[i] + other1 * g, v = b2 * second[i] + other2 * (g * g);
        new_weight[i] = weight[i] * kept - rate * m / (sqrtf(v) * root + eps);
    }
}

static void expected_part(void *argument, int part, int thread) {
    (void)thread;
    const Arrays *a = argument;
    int n = array_of(a, part);
    ptrdiff_t i, until = bound(a, n, part, &i);
    expect(until - i, a->gradients[n] + i, a->weights[n] + i, a->first[n] + i, a->second[n] + i, a->new_weights[n] + i,
           a->kept[n], a);
}

static void adam_part(void *argument, int part, int thread) {
    (void)thread;
    const Arrays *a = argument;
    int n = array_of(a, part);
    ptrdiff_t i, until = bound(a, n, part, &i);
    update(until - i, a->gradients[n] + i, a->weights[n] + i, a->first[n] + i, a->second[n] + i, a->new_weights[n] + i,
           a->new_first[n] + i, a->new_second[n] + i, a->kept[n], a);
}

// The sum of squares of each part.
void allhands_squares(int count, const ptrdiff_t *sizes, const ptrdiff_t *starts, const float *const *arrays,
                      double *sums) {
    Arrays a = {.count = count, .sizes = sizes, .starts = starts, .gradients = arrays, .sums = sums};
    pool_run(square_part, &a, (int)starts[count]);
}

// `arrays` has seven pointers for each array, kind by kind: gradients, weights, first moments, second moments, and the
// places of the new weights and moments. `numbers` has factor, rate, both betas, 1 - beta for both (inexact if computed
// from float32 betas), eps, and the factor of the roots. If only weights are `expected`, there are five pointers,
// without the places of new moments.
void allhands_adam(int expected, int count, const ptrdiff_t *sizes, const ptrdiff_t *starts, float *const *arrays,
                   const float *kept, const float numbers[8]) {
    const float *const *read = (const float *const *)arrays;
    Arrays a = {
        .count = count, .sizes = sizes, .starts = starts, .gradients = read, .weights = read + count,
        .first = read + 2 * count, .second = read + 3 * count, .new_weights = arrays + 4 * count, .kept = kept,
        .factor = numbers[0], .rate = numbers[1], .b1 = numbers[2], .b2 = numbers[3], .other1 = numbers[4],
        .other2 = numbers[5], .eps = numbers[6], .root = numbers[7],
    };
    if (!expected) {
        a.new_first = arrays + 5 * count;
        a.new_second = arrays + 6 * count;
    }
    pool_run(expected ? expected_part : adam_part, &a, (int)starts[count]);
}

// Packing of float32 numbers into codes of four or eight bits, with a scale and an offset for each group, as MLX
// quantises them; and sums of numbers that several processes have packed, with the same bits on every processor.

#include "pool.h"
#include "vectors.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum { GROUP = 64, TOGETHER = 256 }; // numbers of a group, and groups of a part
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint8_t bvec __attribute__((vector_size(16)));

// The least scale. MLX's is 1e-7; where MLX packs, it gets the numbers multiplied by 2^60.
#define LEAST 0x1p-60f * 1e-7f

typedef struct {
    int bits, ranks, mine;
    ptrdiff_t groups, stride; // of a process's words, in words
    const float *row;
    uint32_t *codes;
    float *scales, *offsets;
    const uint32_t *words;
    float *total, *left;
} Packed;

static void pack_group(const Packed *p, ptrdiff_t group) {
    const float *row = p->row + group * GROUP, bins = (float)((1 << p->bits) - 1);
    vec low = load(row), high = low, check = low;
    for (int i = WIDTH; i < GROUP; i += WIDTH) {
        vec x = load(row + i);
        low = choose(x < low, x, low);
        high = choose(x > high, x, high);
        check += x;
    }
    float least = low[0], most = high[0], total = sum(check);
    for (int i = 1; i < WIDTH; i++) {
        least = low[i] < least ? low[i] : least;
        most = high[i] > most ? high[i] : most;
    }
    int below = fabsf(least) > fabsf(most);
    float scale = (most - least) / bins, edge = below ? least : most, offset = 0.0f;
    scale = scale > LEAST ? scale : LEAST;
    scale = below ? scale : -scale;
    float whole = rintf(edge / scale);
    if (whole != 0.0f) {
        scale = edge / whole;
        offset = edge;
    }
    uint8_t codes[GROUP];
    for (int i = 0; i < GROUP; i++) {
        float code = rintf((row[i] - offset) / scale);
        code = code > 0.0f ? code : 0.0f;
        codes[i] = (uint8_t)(code < bins ? code : bins);
    }
    uint8_t *to = (uint8_t *)p->codes + group * (GROUP * p->bits / 8);
    if (p->bits == 4)
        for (int i = 0; i < GROUP / 2; i++)
            to[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    else
        memcpy(to, codes, sizeof codes);
    // Codes cannot hold a number that is not finite, so the offset is then not finite instead.
    p->scales[group] = isfinite(total) ? scale : 0.0f;
    p->offsets[group] = isfinite(total) ? offset : fabsf(total);
}

static ptrdiff_t end_of(const Packed *p, int part) {
    ptrdiff_t end = ((ptrdiff_t)part + 1) * TOGETHER;
    return end < p->groups ? end : p->groups;
}

static void pack_part(void *argument, int part, int thread) {
    (void)thread;
    const Packed *p = argument;
    for (ptrdiff_t group = (ptrdiff_t)part * TOGETHER; group < end_of(p, part); group++)
        pack_group(p, group);
}

static vec sixteen(const uint8_t *codes, int bits, int from) {
    if (bits == 8) {
        bvec bytes;
        memcpy(&bytes, codes + from, sizeof bytes);
        return __builtin_convertvector(bytes, vec);
    }
    const uvec shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    uint32_t two[2];
    memcpy(two, codes + from / 2, sizeof two);
    uvec words = {two[0], two[0], two[0], two[0], two[0], two[0], two[0], two[0],
                  two[1], two[1], two[1], two[1], two[1], two[1], two[1], two[1]};
    return __builtin_convertvector((ivec)((words >> shifts) & 15), vec);
}

static void unpack_group(const Packed *p, ptrdiff_t group) {
    ptrdiff_t coded = p->groups * (GROUP * p->bits / 32);
    for (int i = 0; i < GROUP; i += WIDTH) {
        float *total = p->total + group * GROUP + i;
        vec all_of_them = all(0.0f);
        for (int rank = 0; rank < p->ranks; rank++) {
            const uint32_t *words = p->words + rank * p->stride;
            float scale, offset;
            memcpy(&scale, words + coded + group, sizeof scale);
            memcpy(&offset, words + coded + p->groups + group, sizeof offset);
            vec x = sixteen((const uint8_t *)words + group * (GROUP * p->bits / 8), p->bits, i) * scale;
            // Product and sum are rounded each: a fused operation rounds once, and not every processor has one.
            __asm__("" : "+m"(x));
            x += offset;
            all_of_them = rank ? all_of_them + x : x;
            if (rank == p->mine)
                store(p->left + group * GROUP + i, load(p->row + group * GROUP + i) - x);
        }
        store(total, all_of_them);
    }
}

static void unpack_part(void *argument, int part, int thread) {
    (void)thread;
    const Packed *p = argument;
    for (ptrdiff_t group = (ptrdiff_t)part * TOGETHER; group < end_of(p, part); group++)
        unpack_group(p, group);
}

static int parts_of(ptrdiff_t groups) { return (int)((groups + TOGETHER - 1) / TOGETHER); }

// Words, scales and offsets of a row of whole groups.
void allhands_pack(int bits, ptrdiff_t groups, const float *row, uint32_t *words) {
    float *scales = (float *)(words + groups * (GROUP * bits / 32));
    Packed p = {.bits = bits, .groups = groups, .row = row, .codes = words, .scales = scales, .offsets = scales + groups};
    pool_run(pack_part, &p, parts_of(groups));
}

// The sum, in the order of the processes, of the numbers that each process has packed. The words of a process begin
// `stride` words after those of the one before. `left` gets the rounding errors of `row`, which process `mine` has
// packed; it gets nothing if `mine` is -1.
void allhands_unpack(int bits, ptrdiff_t groups, int ranks, ptrdiff_t stride, const uint32_t *words, int mine,
                     const float *row, float *total, float *left) {
    Packed p = {.bits = bits, .ranks = ranks, .mine = mine, .groups = groups, .stride = stride, .row = row,
                .words = words, .total = total, .left = left};
    pool_run(unpack_part, &p, parts_of(groups));
}

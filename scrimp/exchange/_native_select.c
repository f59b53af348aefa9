/* From a gradient to the entries that are sent, on the host, a row at a time, so that all passes over a row but the first are
 * within a core's cache:
 *
 *   - adds the gradient to the states and the rule's update to the residual, and counts the residual's magnitudes by their upper
 *     bits;
 *   - finds the magnitude of the last entry that is sent, by its upper bits, then by the lower bits among those that agree;
 *   - writes the positions of all larger magnitudes, and of the first equal ones; rounds the values there and removes them.
 *
 * The bits of a magnitude are ordered as the magnitudes, with infinity above all numbers and NaN above that, as in torch. It is
 * plain C that the compiler vectorises, except for `within` and `widen`.
 */
#include <stdint.h>

struct kept {
    void (*span)(const struct kept *, int64_t, int64_t);
    int64_t numel;
    float *rest, *first, *second; /* states: none, a momentum, or Adam's two */
    const void *gradient; /* or none */
    int gradient_kind;
    float carry, lerp, beta2, square; /* coefficients of the gradient in the states */
    float rate, eps; /* coefficients of the states in the residual */
    int64_t per_row, from_rest;
    int64_t *positions; /* NULL if nothing is sent */
    uint16_t *places; /* positions in their rows, for a packet; or NULL */
    void *values; /* NULL if nothing is removed */
    int values_kind, masking;
};

#define JOB struct kept
#include "../chunks/kernels/host_shared.c"

#define AT_ONCE 1024 /* elements, to stay in the first-level cache */
#define WAYS 4 /* parallel counters of the same bins, so that increments do not depend on each other */
#define BINS 2048
#define AHEAD 16 /* entries of a packet whose positions are prefetched */
#define MAGNITUDE 0x7fffffff

typedef uint16_t counts_of[WAYS][BINS]; /* of a row at most: a quarter of it each */
typedef uint64_t within_of(const float *, uint32_t, uint32_t);
typedef void widen_of(const uint16_t *, int, float *);

INLINE uint32_t magnitude(float x) { return to_bits(x) & MAGNITUDE; }

/* Which of 64 magnitudes are between `low` and `high`, as bits. */

static uint64_t within_first(const float *from, int n, uint32_t low, uint32_t high) {
    uint64_t found = 0;
    for (int j = 0; j < n; j++) found |= (uint64_t)(magnitude(from[j]) >= low && magnitude(from[j]) <= high) << j;
    return found;
}

static uint64_t within_plain(const float *from, uint32_t low, uint32_t high) {
    uint8_t here[64]; /* a loop that the compiler vectorises; then eight bytes of 0 or 1 become eight bits */
    uint64_t found = 0, eight;
    for (int j = 0; j < 64; j++) here[j] = (magnitude(from[j]) >= low) & (magnitude(from[j]) <= high);
    for (int j = 0; j < 64; j += 8) {
        memcpy(&eight, here + j, 8);
        found |= eight * 0x0102040810204080u >> 56 << j;
    }
    return found;
}

#ifdef X86
FMA_TARGET static uint64_t within_avx2(const float *from, uint32_t low, uint32_t high) {
    __m256i lowest = _mm256_set1_epi32((int)low), highest = _mm256_set1_epi32((int)high), all = _mm256_set1_epi32(MAGNITUDE);
    uint64_t outside = 0;
    for (int j = 0; j < 64; j += 8) {
        __m256i x = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(from + j)), all);
        __m256i wrong = _mm256_or_si256(_mm256_cmpgt_epi32(lowest, x), _mm256_cmpgt_epi32(x, highest));
        outside |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(wrong)) << j;
    }
    return ~outside;
}

#define WIDE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")))
WIDE_TARGET static uint64_t within_avx512(const float *from, uint32_t low, uint32_t high) {
    __m512i lowest = _mm512_set1_epi32((int)low), highest = _mm512_set1_epi32((int)high), all = _mm512_set1_epi32(MAGNITUDE);
    uint64_t found = 0;
    for (int j = 0; j < 64; j += 16) {
        __m512i x = _mm512_and_si512(_mm512_loadu_si512(from + j), all);
        found |= (uint64_t)_mm512_mask_cmple_epi32_mask(_mm512_cmpge_epi32_mask(x, lowest), x, highest) << j;
    }
    return found;
}
#endif

INLINE uint64_t next_within(const float *from, int64_t n, uint32_t low, uint32_t high, within_of *within) {
    return n < 64 ? within_first(from, (int)n, low, high) : within(from, low, high);
}

/* From the gradient to the residual. */

static void widen_plain(const uint16_t *from, int n, float *to) {
    for (int j = 0; j < n; j++) to[j] = from_fp16(from[j]);
}
#ifdef X86
FMA_TARGET static void widen_vectors(const uint16_t *from, int n, float *to) {
    int j = 0;
    for (; j + 8 <= n; j += 8) _mm256_storeu_ps(to + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + j))));
    widen_plain(from + j, n - j, to + j);
}
#endif

INLINE const float *widened(const struct kept *k, int64_t i, int n, float *restrict to, widen_of *widen_fp16) {
    const uint16_t *restrict from = (const uint16_t *)k->gradient + i;
    if (k->gradient_kind == FP32) return (const float *)k->gradient + i;
    if (k->gradient_kind == BF16) for (int j = 0; j < n; j++) to[j] = from_bits((uint32_t)from[j] << 16);
    else widen_fp16(from, n, to);
    return to;
}

INLINE void add_to(float *restrict into, const float *restrict g, int n, float carry, float rate, int fused) {
    for (int j = 0; j < n; j++) into[j] = times_plus(rate, g[j], carry * into[j], fused);
}

INLINE void add_moments(const struct kept *k, float *restrict m, float *restrict s, const float *restrict g, int n, int fused) {
    float lerp = k->lerp, back = 1.0f - lerp, beta2 = k->beta2, square = k->square;
    int small = fabsf(lerp) < 0.5f;
    for (int j = 0; j < n; j++) {
        float away = g[j] - m[j];
        m[j] = small ? times_plus(lerp, away, m[j], fused) : times_plus(-away, back, g[j], fused);
        s[j] = times_plus(square * g[j], g[j], s[j] * beta2, fused);
    }
}

INLINE void push(const struct kept *k, float *restrict rest, const float *restrict m, const float *restrict s, int n) {
    float rate = k->rate, eps = k->eps;
    for (int j = 0; j < n; j++) rest[j] += rate * m[j] / (__builtin_sqrtf(s[j]) + eps);
}

INLINE void add_gradient(const struct kept *k, int64_t i, int n, widen_of *widen_fp16, int fused) {
    float room[AT_ONCE];
    const float *g = widened(k, i, n, room, widen_fp16);
    if (!k->first) add_to(k->rest + i, g, n, 1.0f, k->rate, fused);
    else if (!k->second) add_to(k->first + i, g, n, k->carry, 1.0f, fused);
    else add_moments(k, k->first + i, k->second + i, g, n, fused);
}

INLINE void push_states(const struct kept *k, int64_t i, int n, int fused) {
    if (!k->first) return;
    if (!k->second) add_to(k->rest + i, k->first + i, n, 1.0f, k->rate, fused);
    else push(k, k->rest + i, k->first + i, k->second + i, n);
}

/* The top-k. */

INLINE void soon(const void *from, int64_t bytes) { __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)bytes)); }

/* Counts, and prefetches what comes next. */
INLINE void count_all(const struct kept *k, int64_t at, int n, counts_of counts) {
    const float *restrict from = k->rest + at;
    const void *gradient = (const char *)k->gradient + at * (k->gradient_kind == FP32 ? 4 : 2);
    uint16_t bins[AT_ONCE];
    int j = 0;
    for (int i = 0; i < n; i++) bins[i] = (uint16_t)(magnitude(from[i]) >> 20);
    for (; j + WAYS <= n; j += WAYS) {
        if (j % 16 == 0) {
            soon(from + j, 4 * AT_ONCE);
            if (k->first) soon(k->first + at + j, 4 * AT_ONCE);
            if (k->second) soon(k->second + at + j, 4 * AT_ONCE);
            if (k->gradient) soon(gradient, (j + AT_ONCE) * (k->gradient_kind == FP32 ? 4 : 2));
        }
        counts[0][bins[j]]++;
        counts[1][bins[j + 1]]++;
        counts[2][bins[j + 2]]++;
        counts[3][bins[j + 3]]++;
    }
    for (; j < n; j++) counts[j % WAYS][bins[j]]++;
}

INLINE void count_within(const float *row, int64_t length, uint32_t low, int shift, counts_of counts, within_of *within) {
    uint32_t high = low + (1u << (shift + 10)) - 1;
    for (int64_t i = 0; i < length; i += 64)
        for (uint64_t found = next_within(row + i, length - i, low, high, within); found; found &= found - 1) {
            int64_t at = i + __builtin_ctzll(found);
            counts[at % WAYS][magnitude(row[at]) >> shift & 1023]++;
        }
}

/* The bin of the last wanted entry, and how many entries are wanted of that bin. */
static uint32_t bin_of(counts_of counts, int64_t *wanted) {
    for (uint32_t bin = BINS - 1;; bin--) {
        int64_t here = counts[0][bin] + counts[1][bin] + counts[2][bin] + counts[3][bin];
        if (here >= *wanted || !bin) return bin;
        *wanted -= here;
    }
}

INLINE void find(const float *row, int64_t length, int64_t wanted, counts_of counts, int64_t start, int64_t *positions,
                 within_of *within) {
    int64_t left = wanted, n = 0;
    uint32_t least = bin_of(counts, &left) << 20;
    for (int shift = 10; shift >= 0; shift -= 10) {
        memset(counts, 0, sizeof(counts_of));
        count_within(row, length, least, shift, counts, within);
        least |= bin_of(counts, &left) << shift;
    }
    for (int64_t i = 0; i < length && n < wanted; i += 64) {
        uint64_t found = next_within(row + i, length - i, least, MAGNITUDE, within);
        for (; found && n < wanted; found &= found - 1) {
            int64_t at = i + __builtin_ctzll(found);
            if (magnitude(row[at]) == least && --left < 0) continue;
            positions[n++] = start + at;
        }
    }
}

static void take(const struct kept *k, int64_t from, int64_t n) {
    if (k->places) for (int64_t j = from; j < from + n; j++) k->places[j] = (uint16_t)(k->positions[j] % BLOCK);
    const float limit = from_bits(k->values_kind == FP32 ? 0x7f7fffff : k->values_kind == BF16 ? 0x7f7f0000 : 0x477fe000);
    for (int64_t j = from; j < from + n; j++) {
        int64_t at = k->positions[j];
        float there = k->rest[at], sent = there > limit ? limit : there < -limit ? -limit : there;
        if (k->values_kind == FP32) ((float *)k->values)[j] = sent;
        else if (k->values_kind == BF16) {
            uint16_t rounded = ((uint16_t *)k->values)[j] = to_bf16(sent, 0);
            sent = from_bits((uint32_t)rounded << 16);
        } else {
            uint16_t rounded = ((uint16_t *)k->values)[j] = to_fp16(sent);
            sent = from_fp16(rounded);
        }
        k->rest[at] = there - sent;
        if (k->masking) k->first[at] = 0.0f;
    }
}

/* Row by row. */

INLINE void rows(const struct kept *given, int64_t start, int64_t end, within_of *within, widen_of *widen_fp16, int fused) {
    const struct kept copy = *given, *k = &copy; /* a private copy, so that the compiler knows that stores cannot change it */
    counts_of counts;
    for (; start < end; start += BLOCK) {
        int64_t stop = start + BLOCK < end ? start + BLOCK : end, before = start / BLOCK * k->per_row;
        int64_t wanted = stop - start == BLOCK ? k->per_row : k->from_rest;
        if (k->positions) memset(counts, 0, sizeof(counts));
        for (int64_t i = start; i < stop; i += AT_ONCE) {
            int n = (int)(i + AT_ONCE < stop ? AT_ONCE : stop - i);
            if (k->gradient) add_gradient(k, i, n, widen_fp16, fused);
            if (!k->positions) continue;
            push_states(k, i, n, fused);
            count_all(k, i, n, counts);
        }
        if (!k->positions) continue;
        find(k->rest + start, stop - start, wanted, counts, start, k->positions + before, within);
        if (k->values) take(k, before, wanted);
    }
}

static void rows_plain(const struct kept *k, int64_t i, int64_t stop) { rows(k, i, stop, within_plain, widen_plain, 0); }
static void rows_fused(const struct kept *k, int64_t i, int64_t stop) { rows(k, i, stop, within_plain, widen_plain, 1); }
#ifdef X86
FMA_TARGET static void rows_avx2(const struct kept *k, int64_t i, int64_t stop) {
    rows(k, i, stop, within_avx2, widen_vectors, 1);
}
WIDE_TARGET static void rows_avx512(const struct kept *k, int64_t i, int64_t stop) {
    rows(k, i, stop, within_avx512, widen_vectors, 1);
}
#define ROWS(level) ((level) == AVX512 ? rows_avx512 : (level) == AVX2 ? rows_avx2 : (level) == FUSED ? rows_fused : rows_plain)
#else
#define ROWS(level) ((level) == FUSED ? rows_fused : rows_plain)
#endif

/* The functions that Python calls. */

void scrimp_kept(float *rest, float *first, float *second, const void *gradient, int gradient_kind, int64_t numel, double carry,
                 double beta1, double beta2, double rate, double eps, int64_t per_row, int64_t from_rest, int64_t *positions,
                 uint16_t *places, void *values, int values_kind, int masking, int level, int threads) {
    struct kept k = {
        .span = ROWS(level),
        .numel = numel, .rest = rest, .first = first, .second = second, .gradient = gradient, .gradient_kind = gradient_kind,
        .carry = (float)carry, .lerp = (float)(1.0 - beta1), .beta2 = (float)beta2, .square = (float)(1.0 - beta2),
        .rate = (float)rate, .eps = (float)eps, .per_row = per_row, .from_rest = from_rest,
        .positions = positions, .places = places, .values = values, .values_kind = values_kind, .masking = masking,
    };
    run(&k, threads);
}

/* Adds a packet's entries, times `by`, to a master, and writes changed entries to a weight. Whole rows have `per_row` entries
 * each, and the remaining entries belong to the remainder. Positions out of range are skipped, and make the result 0. */
static int arrived(float *master, int64_t numel, void *weight, int weight_kind, const uint16_t *places, const void *values,
                   int values_kind, int64_t per_row, int64_t entries, float by, int fused) {
    int64_t row = 0, last = per_row, inside = 1;
    for (int64_t j = 0; j < entries; j++) {
        if (j == last && row + BLOCK < numel) row += BLOCK, last += per_row;
        if (j + AHEAD < last && j + AHEAD < entries) __builtin_prefetch(master + row + places[j + AHEAD], 1);
        int64_t at = row + places[j];
        if (at >= numel) { inside = 0; continue; }
        float value = values_kind == FP32 ? ((const float *)values)[j]
                    : values_kind == BF16 ? from_bits((uint32_t)((const uint16_t *)values)[j] << 16)
                                          : from_fp16(((const uint16_t *)values)[j]);
        float now = master[at] = times_plus(by, value, master[at], fused);
        if (weight_kind == BF16) ((uint16_t *)weight)[at] = to_bf16(now, 0);
        else if (weight_kind == FP16) ((uint16_t *)weight)[at] = to_fp16(now);
        else if (weight_kind == FP32) ((float *)weight)[at] = now;
    }
    return (int)inside;
}

/* The packets of several ranks, one after the other, each a fixed number of bytes after the one before. */
int scrimp_arrived(float *master, int64_t numel, void *weight, int weight_kind, const char *places, const char *values,
                   int values_kind, int64_t per_row, int64_t entries, double times, int64_t ranks, int64_t apart, int fused) {
    int inside = 1;
    for (int64_t r = 0; r < ranks; r++) {
        const uint16_t *there = (const uint16_t *)(places + r * apart);
        const char *sent = values + r * apart;
        inside &= arrived(master, numel, weight, weight_kind, there, sent, values_kind, per_row, entries, (float)times, fused);
    }
    return inside;
}

/* The mean of what the ranks sent whole, each a fixed number of bytes after the one before, in the order of the ranks. */

INLINE void mean_of(float *mean, const char *values, int kind, int64_t numel, int64_t ranks, int64_t apart,
                    widen_of *widen_fp16, int fused) {
    float room[AT_ONCE];
    for (int64_t i = 0; i < numel; i += AT_ONCE) {
        int n = (int)(i + AT_ONCE < numel ? AT_ONCE : numel - i);
        memset(mean + i, 0, sizeof(float) * (size_t)n);
        for (int64_t r = 0; r < ranks; r++) {
            const struct kept one = {.gradient = values + r * apart, .gradient_kind = kind};
            add_to(mean + i, widened(&one, i, n, room, widen_fp16), n, 1.0f, 1.0f / (float)ranks, fused);
        }
    }
}

static void mean_fused(float *mean, const char *values, int kind, int64_t numel, int64_t ranks, int64_t apart) {
    mean_of(mean, values, kind, numel, ranks, apart, widen_plain, 1);
}
#ifdef X86
FMA_TARGET static void mean_vectors(float *mean, const char *values, int kind, int64_t numel, int64_t ranks, int64_t apart) {
    mean_of(mean, values, kind, numel, ranks, apart, widen_vectors, 1);
}
#else
#define mean_vectors mean_fused
#endif

void scrimp_mean(float *mean, const char *values, int kind, int64_t numel, int64_t ranks, int64_t apart, int level) {
    if (level == PLAIN) mean_of(mean, values, kind, numel, ranks, apart, widen_plain, 0);
    else if (level == FUSED) mean_fused(mean, values, kind, numel, ranks, apart);
    else mean_vectors(mean, values, kind, numel, ranks, apart);
}

/* Writes a tensor that is sent whole; returns whether all of it is finite, and writes zeros if not. */
int scrimp_put(void *to, int to_kind, const void *from, int from_kind, int64_t numel) {
    int finite = 1;
    for (int64_t j = 0; j < numel; j++) {
        float x = from_kind == FP32 ? ((const float *)from)[j]
                : from_kind == BF16 ? from_bits((uint32_t)((const uint16_t *)from)[j] << 16)
                                    : from_fp16(((const uint16_t *)from)[j]);
        finite &= magnitude(x) < 0x7f800000;
        if (to_kind == FP32) ((float *)to)[j] = x;
        else ((uint16_t *)to)[j] = to_kind == BF16 ? to_bf16(x, 0) : to_fp16(x);
    }
    if (!finite) memset(to, 0, (size_t)numel * (to_kind == FP32 ? 4 : 2));
    return finite;
}

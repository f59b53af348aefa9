/* A check of the update kernels' plain C against one element at a time, for each form, on whatever processor runs it.
 *
 * The reference is written by torch's formulas, with every product kept by `apart` from being fused by the compiler.
 * It prints how many numbers agreed, or what the first did that does not.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

void scrimp_adamw(float *, float *, float *, const void *, int, void *, int, int64_t, double, double, double, double, double,
                  double, double, int, int);
void scrimp_sgd(float *, float *, const void *, int, void *, int, int64_t, double, double, double, double, double, int, int,
                int, int);

enum { APART, WRITTEN, FIRST, SECOND };
enum { FP32 = 1, BF16, FP16 };
#define MOST 2085 /* elements: two chunks and some */

static float apart(float a, float b) { volatile float product = a * b; return product; }
static float fused(float a, float b, float c, int yes) { return yes ? fmaf(a, b, c) : apart(a, b) + c; }
static float two(float a, float b, float c, float d, int sums) {
    return sums == FIRST ? fmaf(a, b, apart(c, d)) : sums == SECOND ? fmaf(c, d, apart(a, b)) : apart(a, b) + apart(c, d);
}

static uint32_t state = 1;
static float drawn(void) { /* from -2 to 2, of all 24 bits */
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state * 0x1p-30f;
}

static uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static uint16_t upper(float x) { return (uint16_t)(bits(x) >> 16); }
static float widened(uint16_t half) { uint32_t u = (uint32_t)half << 16; float x; memcpy(&x, &u, 4); return x; }

static uint16_t nearest(float x, int nan) { /* in bf16, by looking at both neighbours */
    if (x != x) return nan == 0 ? 0x7fc0 : nan == 1 ? 0xffff : (uint16_t)(upper(x) | 0x40);
    uint16_t down = upper(x), up = (uint16_t)(down + 1);
    double below = fabs((double)x - widened(down)), above = fabs((double)widened(up) - x);
    return below < above || (below == above && !(down & 1)) ? down : up;
}

static long agreed;
static int differ(const char *what, int64_t numel, int64_t at, int level, double got, double want) {
    printf("%s: element %ld of %ld, form %#x: %.9g, not %.9g\n", what, (long)at, (long)numel, (unsigned)level, got, want);
    return 1;
}
static int compare(const char *what, const float *got, const float *want, int64_t numel, int level) {
    for (int64_t i = 0; i < numel; i++, agreed++)
        if (bits(got[i]) != bits(want[i])) return differ(what, numel, i, level, got[i], want[i]);
    return 0;
}

static float p[MOST], m[MOST], v[MOST], g[MOST], P[MOST], M[MOST], V[MOST];
static uint16_t half[MOST], weight[MOST];

static void draw(int64_t numel, int kind) {
    for (int64_t i = 0; i < numel; i++) {
        p[i] = P[i] = drawn(), m[i] = M[i] = drawn(), v[i] = V[i] = fabsf(drawn()), g[i] = drawn();
        if (kind == BF16) half[i] = upper(g[i]), g[i] = widened(half[i]);
        if (kind == FP16) half[i] = (uint16_t)(0x3c00 | (state >> 6 & 0x83ff)), g[i] = (half[i] & 0x8000 ? -1.0f : 1.0f) * (1.0f + (half[i] & 0x3ff) * 0x1p-10f);
    }
}

static int weights(const char *what, int64_t numel, int level) {
    for (int64_t i = 0; i < numel; i++, agreed++)
        if (weight[i] != nearest(p[i], level & 3)) return differ(what, numel, i, level, weight[i], nearest(p[i], level & 3));
    return 0;
}

static int adamw(int64_t numel, int level, int kind, double beta1) {
    int lanes = level >> 8, body = level >> 4 & 3, tail = level >> 2 & 3;
    float lerp = (float)(1.0 - beta1), beta2 = (float)0.99, square = (float)(1.0 - 0.99), root = (float)sqrt(1.0 - pow(0.99, 3));
    float step = (float)(0.01 / (1.0 - pow(beta1, 3))), decay = (float)(1.0 - 0.01 * 0.1), eps = (float)1e-8, scale = 0.37f;
    draw(numel, kind);
    scrimp_adamw(p, m, v, kind == FP32 ? (void *)g : (void *)half, kind, weight, BF16, numel, scale, 0.01, beta1, 0.99, 1e-8, 0.1, 3,
                 level, 1);
    for (int64_t i = 0; i < numel; i++) {
        int sums = i < numel - numel % lanes ? body : tail;
        float x = apart(g[i], scale), away = x - M[i];
        M[i] = fabsf(lerp) < 0.5f ? fused(lerp, away, M[i], sums) : fused(away, lerp - 1.0f, x, sums);
        V[i] = two(V[i], beta2, apart(square, x), x, sums);
        volatile float moved = apart(step, M[i]) / (sqrtf(V[i]) / root + eps);
        P[i] = apart(P[i], decay) - moved;
    }
    return compare("AdamW's first moment", m, M, numel, level) || compare("AdamW's second moment", v, V, numel, level) ||
           compare("AdamW's master", p, P, numel, level) || weights("AdamW's weight", numel, level);
}

static int sgd(int64_t numel, int level, int kind, double momentum, int nesterov, int starts) {
    int lanes = level >> 8, body = level >> 4 & 3, tail = level >> 2 & 3;
    float carry = (float)momentum, undamped = (float)(1.0 - 0.1), lr = (float)0.01, decay = (float)0.1;
    draw(numel, kind);
    if (numel > 5) p[2] = P[2] = NAN, p[5] = P[5] = -NAN;
    scrimp_sgd(p, m, kind == FP32 ? (void *)g : (void *)half, kind, weight, BF16, numel, 1.0, 0.01, momentum, 0.1, 0.1, nesterov,
               starts, level, 1);
    for (int64_t i = 0; i < numel; i++) {
        int inside = i < numel - numel % lanes, sums = inside ? body : tail;
        int order = inside && body != APART ? SECOND : sums; /* in the body an fmadd of torch's source */
        float x = fused(P[i], decay, g[i], sums != APART);
        if (momentum != 0) {
            M[i] = starts ? x : two(M[i], carry, x, undamped, order);
            x = nesterov ? fused(M[i], carry, x, sums != APART) : M[i];
        }
        P[i] = fused(-x, lr, P[i], sums >= FIRST);
    }
    if (weights("SGD's weight", numel, level)) return 1;
    for (int k = 2; k < 6 && numel > 5; k += 3) p[k] = P[k] = m[k] = M[k] = 0; /* no numbers, of any bits */
    return compare("SGD's momentum", m, M, numel, level) || compare("SGD's master", p, P, numel, level);
}

int main(void) {
    static const int64_t lengths[] = {0, 1, 3, 4, 5, 7, 8, 15, 16, 17, 31, 1023, 1024, 1031, MOST};
    static const int every_lanes[] = {4, 8, 16}, tails[] = {APART, FIRST, SECOND};
    int turn = 0;
    for (int l = 0; l < 3; l++) for (int body = APART; body <= SECOND; body++) for (int t = 0; t < 3; t++)
        for (int n = 0; n < (int)(sizeof(lengths) / sizeof(*lengths)); n++, turn++) {
            int level = every_lanes[l] << 8 | body << 4 | tails[t] << 2 | turn % 3, kind = 1 + turn / 3 % 3;
            if (adamw(lengths[n], level, kind, turn % 2 ? 0.9 : 0.3)) return 1;
            if (sgd(lengths[n], level, kind, turn % 5 ? 0.9 : 0.0, turn % 2, turn % 7 == 0)) return 1;
        }
    printf("%ld numbers agree\n", agreed);
    return 0;
}

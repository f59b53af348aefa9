/* The host's optimizer update in one pass over memory: gradient in (fp32, bf16 or fp16), fp32 master and states updated in
 * place, 16-bit weight out or none.
 *
 * Every bit is that of torch's fused CPU kernels. On x86-64 those have an AVX2 form, which AVX-512 machines use too, and a
 * form without fused multiply-adds. The first rounds its last numel % 8 elements in another order than the rest: `last` here.
 * The other forms, and all that are for aarch64, are in `kernels/host_plain.c`, which the compiler vectorises.
 * Where a multiply and an add are rounded once is written out below; the compiler must not choose (-ffp-contract=off).
 */
#ifndef LANES

#include <stdint.h>

#define AHEAD 4096 /* bytes to prefetch ahead: the hardware prefetcher stops at the end of a page */

struct update {
    void (*span)(const struct update *, int64_t, int64_t);
    int64_t numel;
    float *master, *first, *second;
    const void *gradient;
    void *weight;
    int gradient_kind, weight_kind;
    float scale;
    float decay, lerp, beta2, square, root, eps, step; /* AdamW */
    int8_t *first_codes; /* AdamW with states of 8 bits */
    uint8_t *second_codes;
    float *first_scales, *second_scales;
    uint32_t seed;
    float weight_decay, momentum, undamped, lr; /* SGD */
    int decayed, momentous, starts, nesterov;
    int lanes, body, tail, nan; /* the form, see `kernels/host_plain.c` */
};

#define JOB struct update
#include "host_shared.c"

INLINE void soon(const void *from) { __builtin_prefetch((const void *)((uintptr_t)from + AHEAD)); }

#include "host_plain.c"

#ifdef X86

FMA_TARGET static void adamw_last(const struct update *u, int64_t i, int64_t stop) {
    adamw_part(u, i, stop, -(1.0f - u->lerp), FIRST, ONES);
}
FMA_TARGET static void sgd_last(const struct update *u, int64_t i, int64_t stop) { sgd_part(u, i, stop, FIRST, 1, ONES); }

/* Eight or sixteen at a time: the end of this file, twice. */

#define ROUND (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

#define LANES 8
#define TARGET FMA_TARGET
#define NAME(name) name##_avx2
#define REST(name) name##_last
#define F __m256
#define OP(name) _mm256_##name##_ps
#define PICK(yes, a, b) _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_set1_epi32(-(yes))))

TARGET INLINE F load_bf16_avx2(const uint16_t *from) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
TARGET INLINE F load_fp16_avx2(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
TARGET INLINE void store_bf16_avx2(uint16_t *to, F x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i high = _mm256_srli_epi32(_mm256_or_si256(sum, nan), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
}
TARGET INLINE void store_fp16_avx2(uint16_t *to, F x) { _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(x, ROUND)); }

#include "host_update.c"

#undef LANES
#undef TARGET
#undef NAME
#undef REST
#undef F
#undef OP
#undef PICK

#define LANES 16
#define TARGET __attribute__((target("avx512f,avx2,fma,f16c")))
#define NAME(name) name##_avx512
#define REST(name) name##_avx2
#define F __m512
#define OP(name) _mm512_##name##_ps
#define PICK(yes, a, b) _mm512_mask_blend_ps((yes) ? 0xffff : 0, b, a)

TARGET INLINE F load_bf16_avx512(const uint16_t *from) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
TARGET INLINE F load_fp16_avx512(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
TARGET INLINE void store_bf16_avx512(uint16_t *to, F x) {
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __m512i high = _mm512_srli_epi32(sum, 16);
    high = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high, _mm512_set1_epi32(0xffff));
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(high));
}
TARGET INLINE void store_fp16_avx512(uint16_t *to, F x) { _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(x, ROUND)); }

#include "host_update.c"

#define SPAN(name, level) ((level) == AVX512 ? name##_avx512 : (level) == AVX2 ? name##_avx2 : name##_plain)
#else
#define SPAN(name, level) name##_plain
#endif /* X86 */

#include "host_codec.c"

/* The functions that Python calls. `level` is one of those in `kernels/host_shared.c`, or a form. */

static struct update adamw_of(const void *gradient, int gradient_kind, void *weight, int weight_kind, int64_t numel, double scale,
                              double lr, double beta1, double beta2, double eps, double weight_decay, double count, int level) {
    double times = (float)count; /* torch stores it in fp32 */
    struct update u = {
        .numel = numel, .gradient = gradient, .weight = weight,
        .gradient_kind = gradient_kind, .weight_kind = weight_kind, .scale = (float)scale,
        .lerp = (float)(1.0 - beta1), .beta2 = (float)beta2,
        .square = (float)(1.0 - beta2), .root = (float)sqrt(1.0 - pow(beta2, times)), .eps = (float)eps,
        .step = (float)(lr / (1.0 - pow(beta1, times))),
    };
    form_of(&u, level);
    double decay = u.tail == APART ? 1.0 - lr * weight_decay : __builtin_fma(-lr, weight_decay, 1.0);
    u.decay = weight_decay != 0.0 ? (float)decay : 1.0f;
    return u;
}

void scrimp_adamw(float *master, float *first, float *second, const void *gradient, int gradient_kind, void *weight,
                  int weight_kind, int64_t numel, double scale, double lr, double beta1, double beta2, double eps,
                  double weight_decay, double count, int level, int threads) {
    struct update u = adamw_of(gradient, gradient_kind, weight, weight_kind, numel, scale, lr, beta1, beta2, eps, weight_decay,
                               count, level);
    u.span = SPAN(adamw, level);
    u.master = master, u.first = first, u.second = second;
    run(&u, threads);
}

void scrimp_adamw_coded(float *master, int8_t *first_codes, float *first_scales, uint8_t *second_codes, float *second_scales,
                        const void *gradient, int gradient_kind, void *weight, int weight_kind, int64_t numel, double scale,
                        double lr, double beta1, double beta2, double eps, double weight_decay, double count, uint32_t seed,
                        int level, int threads) {
    struct update u = adamw_of(gradient, gradient_kind, weight, weight_kind, numel, scale, lr, beta1, beta2, eps, weight_decay,
                               count, level);
    u.span = SPAN(coded, level);
    u.master = master, u.seed = seed;
    u.first_codes = first_codes, u.first_scales = first_scales, u.second_codes = second_codes, u.second_scales = second_scales;
    run(&u, threads);
}

void scrimp_sgd(float *master, float *first, const void *gradient, int gradient_kind, void *weight, int weight_kind,
                int64_t numel, double scale, double lr, double momentum, double dampening, double weight_decay,
                int nesterov, int starts, int level, int threads) {
    struct update u = {
        .span = SPAN(sgd, level),
        .numel = numel, .master = master, .first = first, .gradient = gradient, .weight = weight,
        .gradient_kind = gradient_kind, .weight_kind = weight_kind, .scale = (float)scale,
        .decayed = weight_decay != 0.0, .momentous = momentum != 0.0, .starts = starts, .nesterov = nesterov,
        .weight_decay = (float)weight_decay, .momentum = (float)momentum, .undamped = (float)(1.0 - dampening),
        .lr = (float)lr,
    };
    form_of(&u, level);
    run(&u, threads);
}

#else /* LANES: the vector forms */

TARGET INLINE F NAME(gradients)(const struct update *u, int64_t i) {
    F g;
    if (u->gradient_kind == FP32) g = OP(loadu)((const float *)u->gradient + i);
    else if (u->gradient_kind == BF16) g = NAME(load_bf16)((const uint16_t *)u->gradient + i);
    else g = NAME(load_fp16)((const uint16_t *)u->gradient + i);
    return OP(mul)(g, OP(set1)(u->scale));
}

TARGET INLINE void NAME(weights)(const struct update *u, int64_t i, F x) {
    if (u->weight_kind == BF16) NAME(store_bf16)((uint16_t *)u->weight + i, x);
    if (u->weight_kind == FP16) NAME(store_fp16)((uint16_t *)u->weight + i, x);
}

TARGET static void NAME(adamw)(const struct update *given, int64_t i, int64_t stop) {
    const struct update copy = *given, *u = &copy; /* a private copy, so that the compiler knows that stores cannot change it */
    int small = fabsf(u->lerp) < 0.5f;
    F toward = OP(set1)(small ? u->lerp : u->lerp - 1.0f), decay = OP(set1)(u->decay), beta2 = OP(set1)(u->beta2);
    F square = OP(set1)(u->square), root = OP(set1)(u->root), eps = OP(set1)(u->eps), step = OP(set1)(-u->step);
    for (; i + LANES <= stop; i += LANES) {
        F g = NAME(gradients)(u, i), m = OP(loadu)(u->first + i), v = OP(loadu)(u->second + i);
        F p = OP(mul)(OP(loadu)(u->master + i), decay);
        soon(u->first + i);
        soon(u->second + i);
        soon(u->master + i);
        m = OP(fmadd)(toward, OP(sub)(g, m), PICK(small, m, g));
        v = OP(fmadd)(g, OP(mul)(square, g), OP(mul)(v, beta2));
        p = OP(add)(p, OP(div)(OP(mul)(step, m), OP(add)(OP(div)(OP(sqrt)(v), root), eps)));
        OP(storeu)(u->first + i, m);
        OP(storeu)(u->second + i, v);
        OP(storeu)(u->master + i, p);
        NAME(weights)(u, i, p);
    }
    if (i < stop) REST(adamw)(u, i, stop);
}

TARGET static void NAME(sgd)(const struct update *given, int64_t i, int64_t stop) {
    const struct update copy = *given, *u = &copy;
    F decay = OP(set1)(u->weight_decay), momentum = OP(set1)(u->momentum), undamped = OP(set1)(u->undamped);
    F lr = OP(set1)(-u->lr);
    for (; i + LANES <= stop; i += LANES) {
        F g = NAME(gradients)(u, i), p = OP(loadu)(u->master + i);
        soon(u->master + i);
        if (u->momentous) soon(u->first + i);
        if (u->decayed) g = OP(fmadd)(p, decay, g);
        if (u->momentous) {
            F m = u->starts ? g : OP(fmadd)(undamped, g, OP(mul)(OP(loadu)(u->first + i), momentum));
            OP(storeu)(u->first + i, m);
            g = u->nesterov ? OP(fmadd)(m, momentum, g) : m;
        }
        p = OP(fmadd)(g, lr, p);
        OP(storeu)(u->master + i, p);
        NAME(weights)(u, i, p);
    }
    if (i < stop) REST(sgd)(u, i, stop);
}

#endif

/* AdamW with both moments stored in 8 bits: decode some blocks, update, encode, all within a core's cache. Part of
 * `kernels/host_update.c`.
 *
 * `tables/state_codec.py` documents the codes and has the same arithmetic, bit for bit. It is plain C here, for every level:
 * integers and single products, which the compiler vectorises without changing results.
 */

#define CODED 64 /* elements with one scale */
#define AT_ONCE 1024 /* elements decoded at a time; BLOCK is a multiple of it */

#define SHIFT 20
#define ONE (0x3f800000 >> SHIFT)
#define MAGNITUDE 0x7fffffff
#define SMALLEST 0x00800000
#define DITHER 0xffff0

INLINE void decode(const int8_t *restrict codes, float scale, float *restrict to) {
    for (int k = 0; k < CODED; k++) {
        int32_t code = codes[k], magnitude = code < 0 ? -code : code;
        uint32_t bits = (uint32_t)(magnitude + ONE - 127) << SHIFT | ((uint32_t)code & 0x80000000);
        to[k] = (code ? from_bits(bits) : 0.0f) * scale;
    }
}

INLINE void decode_unsigned(const uint8_t *restrict codes, float scale, float *restrict to) {
    for (int k = 0; k < CODED; k++) to[k] = from_bits((uint32_t)(codes[k] + ONE - 255) << SHIFT) * scale;
}

INLINE float scale_of(const float *from) {
    int32_t largest = SMALLEST;
    for (int k = 0; k < CODED; k++) {
        int32_t bits = (int32_t)(to_bits(from[k]) & MAGNITUDE);
        largest = bits > largest ? bits : largest;
    }
    return from_bits((uint32_t)largest);
}

INLINE int32_t coded(float relative, uint32_t dither, int32_t largest) {
    int32_t code = ((int32_t)((to_bits(relative) & MAGNITUDE) + dither) >> SHIFT) - (ONE - largest);
    code = code < 0 ? 0 : code;
    return code > largest ? largest : code;
}

INLINE uint32_t hash(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352dU;
    x = (x ^ x >> 15) * 0x846ca68bU;
    return x ^ x >> 16;
}

INLINE void encode(const float *restrict first, const float *restrict second, uint32_t seed, int8_t *restrict codes,
                   float *restrict scale, uint8_t *restrict unsigned_codes, float *restrict square_scale) {
    *scale = scale_of(first);
    *square_scale = scale_of(second);
    float inverse = 1.0f / *scale, square_inverse = 1.0f / *square_scale;
    for (int k = 0; k < CODED; k++) {
        uint32_t random = hash(seed + (uint32_t)k);
        float relative = first[k] * inverse;
        int32_t code = coded(relative, random << 4 & DITHER, 127);
        codes[k] = (int8_t)(to_bits(relative) >> 31 ? -code : code);
        unsigned_codes[k] = (uint8_t)coded(second[k] * square_inverse, random >> 12 & DITHER, 255);
    }
}

INLINE int64_t wide(int kind) { return kind == NONE ? 0 : kind == FP32 ? 4 : 2; }

INLINE void coded_span(const struct update *u, int64_t i, int64_t stop, void (*adamw)(const struct update *, int64_t, int64_t)) {
    float first[AT_ONCE], second[AT_ONCE];
    int8_t codes[CODED] = {0};
    uint8_t unsigned_codes[CODED] = {0};
    struct update part = *u;
    part.first = first;
    part.second = second;
    for (; i < stop; i += AT_ONCE) {
        int64_t numel = stop - i < AT_ONCE ? stop - i : AT_ONCE, whole = numel / CODED, rest = numel % CODED;
        int8_t *first_codes = u->first_codes + i;
        uint8_t *second_codes = u->second_codes + i;
        float *first_scales = u->first_scales + i / CODED, *second_scales = u->second_scales + i / CODED;
        for (int64_t b = 0; b < whole; b++) {
            soon(first_codes + b * CODED);
            soon(second_codes + b * CODED);
            decode(first_codes + b * CODED, first_scales[b], first + b * CODED);
            decode_unsigned(second_codes + b * CODED, second_scales[b], second + b * CODED);
        }
        if (rest) { /* the incomplete last block of a parameter: missing elements count as 0 */
            memcpy(codes, first_codes + whole * CODED, rest);
            memcpy(unsigned_codes, second_codes + whole * CODED, rest);
            decode(codes, first_scales[whole], first + whole * CODED);
            decode_unsigned(unsigned_codes, second_scales[whole], second + whole * CODED);
        }
        part.master = u->master + i;
        part.gradient = (const char *)u->gradient + i * wide(u->gradient_kind);
        part.weight = (char *)u->weight + i * wide(u->weight_kind);
        part.numel = u->numel - i;
        adamw(&part, 0, numel);
        uint32_t seed = u->seed + (uint32_t)i;
        for (int64_t b = 0; b < whole; b++)
            encode(first + b * CODED, second + b * CODED, seed + (uint32_t)(b * CODED), first_codes + b * CODED, first_scales + b,
                   second_codes + b * CODED, second_scales + b);
        if (rest) {
            memset(first + numel, 0, (CODED - rest) * sizeof(float));
            memset(second + numel, 0, (CODED - rest) * sizeof(float));
            encode(first + whole * CODED, second + whole * CODED, seed + (uint32_t)(whole * CODED), codes, first_scales + whole,
                   unsigned_codes, second_scales + whole);
            memcpy(first_codes + whole * CODED, codes, rest);
            memcpy(second_codes + whole * CODED, unsigned_codes, rest);
        }
    }
}

static void coded_plain(const struct update *u, int64_t i, int64_t stop) { coded_span(u, i, stop, adamw_plain); }
#ifdef X86
FMA_TARGET static void coded_avx2(const struct update *u, int64_t i, int64_t stop) { coded_span(u, i, stop, adamw_avx2); }
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")))
static void coded_avx512(const struct update *u, int64_t i, int64_t stop) { coded_span(u, i, stop, adamw_avx512); }
#endif

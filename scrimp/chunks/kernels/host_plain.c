/* The update in plain C, which the compiler vectorises, for every processor. Part of `kernels/host_update.c`.
 *
 * torch's kernels update whole vectors of `lanes` elements, the `body`, and the last numel % lanes elements one by one, the
 * `tail`. Which products they round before they add differs between processors, compilers and the two parts. A form is
 * `lanes`, the `sums` of each part and a `nan_kind`. Python tries forms until one has torch's bits.
 */

enum sums {
    APART, /* every product is rounded */
    WRITTEN, /* fused where torch's source says fmadd; in the body only */
    FIRST, /* fused too where torch's compiler may: of a * b + c * d the product a * b */
    SECOND, /* or the product c * d */
};

#define CHUNK 1024 /* elements, to stay in the first-level cache */
#define PLAIN_LANES 8 /* of torch's vectors on processors without vectors */

static void form_of(struct update *u, int level) {
    int packed = level > FUSED;
    u->lanes = packed ? level >> 8 : PLAIN_LANES;
    u->body = packed ? level >> 4 & 3 : level == PLAIN ? APART : SECOND;
    u->tail = packed ? level >> 2 & 3 : level == PLAIN ? APART : FIRST;
    u->nan = packed ? level & 3 : level == PLAIN ? QUIET : ONES;
}

INLINE float sum_of_two(float a, float b, float c, float d, int sums) {
    return sums == FIRST ? __builtin_fmaf(a, b, c * d) : sums == SECOND ? __builtin_fmaf(c, d, a * b) : a * b + c * d;
}

INLINE void gradients(const struct update *u, int64_t i, int n, float *restrict to) {
    const float scale = u->scale, *restrict whole = (const float *)u->gradient + i;
    const uint16_t *restrict half = (const uint16_t *)u->gradient + i;
    if (u->gradient_kind == FP32) for (int j = 0; j < n; j++) to[j] = whole[j] * scale;
    else if (u->gradient_kind == BF16) for (int j = 0; j < n; j++) to[j] = from_bits((uint32_t)half[j] << 16) * scale;
    else for (int j = 0; j < n; j++) to[j] = from_fp16(half[j]) * scale;
}

INLINE void round_to(uint16_t *restrict to, const float *restrict from, int n, int nan) {
    for (int j = 0; j < n; j++) to[j] = to_bf16(from[j], nan);
}

INLINE void weights(const struct update *u, int64_t i, int n, int nan) {
    const float *restrict from = u->master + i;
    uint16_t *restrict to = (uint16_t *)u->weight + i;
    if (u->weight_kind == FP16) for (int j = 0; j < n; j++) to[j] = to_fp16(from[j]);
    if (u->weight_kind != BF16) return;
    if (nan == QUIET) round_to(to, from, n, QUIET);
    else if (nan == ONES) round_to(to, from, n, ONES);
    else round_to(to, from, n, KEPT);
}

/* `back` is 1 - lerp with its sign changed: where that is 0, torch's vector code and its scalar code differ in sign. */
INLINE void adamw_some(const struct update *u, float *restrict master, float *restrict first, float *restrict second,
                       const float *restrict gradient, int n, float back, int sums) {
    float lerp = u->lerp, beta2 = u->beta2, square = u->square, decay = u->decay, step = u->step, root = u->root, eps = u->eps;
    int small = fabsf(lerp) < 0.5f, fused = sums != APART;
    for (int j = 0; j < n; j++) {
        float g = gradient[j], away = g - first[j];
        float m = small ? times_plus(lerp, away, first[j], fused) : times_plus(away, back, g, fused);
        float v = sum_of_two(second[j], beta2, square * g, g, sums);
        master[j] = master[j] * decay - step * m / (__builtin_sqrtf(v) / root + eps);
        first[j] = m;
        second[j] = v;
    }
}

INLINE void adamw_part(const struct update *given, int64_t i, int64_t stop, float back, int sums, int nan) {
    const struct update copy = *given, *u = &copy; /* a private copy, so that the compiler knows that stores cannot change it */
    float gradient[CHUNK];
    for (; i < stop; i += CHUNK) {
        int n = (int)(stop - i < CHUNK ? stop - i : CHUNK);
        gradients(u, i, n, gradient);
        adamw_some(u, u->master + i, u->first + i, u->second + i, gradient, n, back, sums);
        weights(u, i, n, nan);
    }
}

INLINE void momentum_some(const struct update *u, float *restrict first, float *restrict gradient, int n, int sums) {
    float momentum = u->momentum, undamped = u->undamped;
    if (u->starts) memcpy(first, gradient, sizeof(float) * (size_t)n);
    else for (int j = 0; j < n; j++) first[j] = sum_of_two(first[j], momentum, gradient[j], undamped, sums);
    if (u->nesterov) for (int j = 0; j < n; j++) gradient[j] = times_plus(first[j], momentum, gradient[j], sums != APART);
    else memcpy(gradient, first, sizeof(float) * (size_t)n);
}

INLINE void sgd_some(const struct update *u, float *restrict master, float *restrict gradient, int64_t i, int n, int sums,
                     int fused_step) {
    float weight_decay = u->weight_decay, lr = u->lr;
    if (u->decayed)
        for (int j = 0; j < n; j++) gradient[j] = times_plus(master[j], weight_decay, gradient[j], sums != APART);
    if (u->momentous) momentum_some(u, u->first + i, gradient, n, sums);
    for (int j = 0; j < n; j++) master[j] = times_plus(-gradient[j], lr, master[j], fused_step);
}

INLINE void sgd_part(const struct update *given, int64_t i, int64_t stop, int sums, int fused_step, int nan) {
    const struct update copy = *given, *u = &copy;
    float gradient[CHUNK];
    for (; i < stop; i += CHUNK) {
        int n = (int)(stop - i < CHUNK ? stop - i : CHUNK);
        gradients(u, i, n, gradient);
        sgd_some(u, u->master + i, gradient, i, n, sums, fused_step);
        weights(u, i, n, nan);
    }
}

static void adamw_as(const struct update *u, int64_t i, int64_t stop, float back, int sums) {
    if (sums == APART) adamw_part(u, i, stop, back, APART, u->nan);
    else if (sums == WRITTEN) adamw_part(u, i, stop, back, WRITTEN, u->nan);
    else if (sums == FIRST) adamw_part(u, i, stop, back, FIRST, u->nan);
    else adamw_part(u, i, stop, back, SECOND, u->nan);
}

static void sgd_as(const struct update *u, int64_t i, int64_t stop, int sums, int fused_step) {
    if (sums == APART) sgd_part(u, i, stop, APART, 0, u->nan);
    else if (sums == FIRST) sgd_part(u, i, stop, FIRST, 1, u->nan);
    else if (fused_step) sgd_part(u, i, stop, SECOND, 1, u->nan);
    else sgd_part(u, i, stop, SECOND, 0, u->nan);
}

INLINE int64_t border_of(const struct update *u, int64_t stop) {
    int64_t border = u->numel - u->numel % u->lanes;
    return border < stop ? border : stop;
}

static void adamw_plain(const struct update *u, int64_t i, int64_t stop) {
    int64_t border = border_of(u, stop);
    adamw_as(u, i, border, u->lerp - 1.0f, u->body);
    adamw_as(u, border, stop, -(1.0f - u->lerp), u->tail);
}

/* The momentum's sum is an fmadd in the source of torch's body, which fuses the second product. */
static void sgd_plain(const struct update *u, int64_t i, int64_t stop) {
    int64_t border = border_of(u, stop);
    sgd_as(u, i, border, u->body == APART ? APART : SECOND, u->body >= FIRST);
    sgd_as(u, border, stop, u->tail, 1);
}

/* Code that the host's kernels share: 16-bit numbers, instruction sets, threads. Each kernel includes it after it has defined
 * JOB: a structure with `span`, a function that does the job for a range of elements, and `numel`.
 */
#ifdef __x86_64__
#include <immintrin.h>
#define X86 1
#endif
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum kind { NONE, FP32, BF16, FP16 };
enum level { PLAIN, AVX2, AVX512, FUSED }; /* FUSED: plain C for processors that all have fused multiply-adds */
enum nan_kind { QUIET, ONES, KEPT }; /* what is no number, in bf16: 0x7fc0, 0xffff, or the upper half of its bits */

#define BLOCK 65536 /* elements that a thread takes at a time; a multiple of the lanes, so that the tail stays in place */

#ifdef X86
#define FMA_TARGET __attribute__((target("avx2,fma,f16c")))
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

#ifdef __aarch64__ /* all aarch64 processors convert them in hardware */
INLINE float from_fp16(uint16_t half) { __fp16 x; memcpy(&x, &half, 2); return x; }
INLINE uint16_t to_fp16(float x) { __fp16 rounded = (__fp16)x; uint16_t half; memcpy(&half, &rounded, 2); return half; }
#else
INLINE float from_fp16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0));
    if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + 0x38000000));
    float small = (float)(int32_t)rest * 0x1p-24f;
    return sign ? -small : small;
}

INLINE uint16_t to_fp16(float x) {
    uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* the sum's last bit is worth 2^-24, as a subnormal's is */
        return (uint16_t)(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}
#endif

INLINE uint16_t to_bf16(float x, int nan) {
    uint32_t bits = to_bits(x);
    uint16_t no_number = nan == QUIET ? 0x7fc0 : nan == ONES ? 0xffff : (uint16_t)(bits >> 16 | 0x40);
    return x != x ? no_number : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float times_plus(float a, float b, float c, int fused) { return fused ? __builtin_fmaf(a, b, c) : a * b + c; }

int scrimp_level(void) {
#ifdef X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return PLAIN;
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    return wide ? AVX512 : AVX2;
#elif defined(__aarch64__)
    return FUSED;
#else
    return PLAIN;
#endif
}

/* Threads: workers that sleep until there is a job, and take blocks of it until none is left. */

static struct {
    pthread_mutex_t call, lock; /* one update at a time; what follows */
    pthread_cond_t wake, done;
    int workers, wanted, busy;
    uint64_t round;
    const JOB *job;
    atomic_llong next;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER,
          0, 0, 0, 0, 0, 0};

static void work(const JOB *u) {
    for (;;) {
        int64_t start = BLOCK * (int64_t)atomic_fetch_add(&pool.next, 1);
        if (start >= u->numel) return;
        u->span(u, start, start + BLOCK < u->numel ? start + BLOCK : u->numel);
    }
}

static void *worker(void *number) {
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.round == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = pool.round;
        if ((intptr_t)number >= pool.wanted) continue;
        const JOB *job = pool.job;
        pthread_mutex_unlock(&pool.lock);
        work(job);
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0) pthread_cond_signal(&pool.done);
    }
    return 0;
}

static void hire(int wanted) {
    if (pool.workers >= wanted) return;
    sigset_t all, before; /* signals go to the program's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, 0, worker, (void *)(intptr_t)pool.workers)) break;
        pthread_detach(thread);
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

static void run(const JOB *u, int threads) {
    int64_t blocks = (u->numel + BLOCK - 1) / BLOCK;
    if (threads > blocks) threads = (int)blocks;
    if (threads <= 1) {
        u->span(u, 0, u->numel);
        return;
    }
    pthread_mutex_lock(&pool.call);
    pthread_mutex_lock(&pool.lock);
    hire(threads - 1);
    pool.wanted = pool.busy = pool.workers < threads - 1 ? pool.workers : threads - 1;
    pool.job = u;
    atomic_store(&pool.next, 0);
    pool.round++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(u);
    pthread_mutex_lock(&pool.lock);
    while (pool.busy) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.call);
}

static void forked(void) { /* a child process has no workers, and inherits locked locks */
    pthread_mutex_init(&pool.call, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    pthread_cond_init(&pool.done, 0);
    pool.workers = 0;
    pool.round = 0;
}

__attribute__((constructor)) static void loaded(void) { pthread_atfork(0, 0, forked); }

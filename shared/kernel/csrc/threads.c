/* The threads of an engine. One job at a time; inside a job, barriers. Whoever waits spins for a
 * moment (a barrier is mostly passed within a microsecond), then sleeps.
 *
 * Without POSIX threads or the atomic operations of GCC and Clang, everything runs on one thread.
 */
#define _POSIX_C_SOURCE 200809L
#include "fpmode.h"
#include "internal.h"

#include <stdlib.h>

#if defined(__GNUC__) && (defined(__unix__) || defined(__APPLE__))
#define CP_THREADS 1
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#endif

#define MAX_THREADS 256

struct cp_engine {
    const cp_path *path;
    int32_t num_threads;
    uint64_t last_level_bytes;
#ifdef CP_THREADS
    cp_team team; /* of the job that runs on all threads */
    cp_work *work;
    void *context;
    uint32_t job;      /* counts jobs; helpers wait for it to change */
    uint32_t sleepers;
    uint32_t quit;
    int32_t helpers;   /* threads beside the caller's that exist */
    pid_t owner;       /* the process they exist in: a forked child has none */
    pthread_mutex_t busy, sleep;
    pthread_cond_t wake;
    pthread_t threads[MAX_THREADS];
    int32_t numbers[MAX_THREADS];
#endif
};

const cp_path *cp_engine_path(const cp_engine *engine)
{
    return engine->path;
}

int32_t cp_passes_by(const cp_engine *engine, uint64_t weight_bytes)
{
    return engine->last_level_bytes != 0 && weight_bytes > engine->last_level_bytes / 2;
}

int32_t cp_engine_threads(const cp_engine *engine)
{
    return engine->num_threads;
}

void cp_share(const cp_team *team, int32_t me, int32_t total, int32_t unit, int32_t *first,
              int32_t *end)
{
    int64_t units = ((int64_t)total + unit - 1) / unit, n = team->size;
    int64_t from = units * me / n * unit, to = units * (me + 1) / n * unit;
    *first = (int32_t)(from < total ? from : total);
    *end = (int32_t)(to < total ? to : total);
}

/* Size, engine, phase and `stop` are left: a helper may still be leaving its last barrier with them. */
static void reset_team(cp_team *team)
{
    team->bad = UINT32_MAX;
    team->next = team->arrived = 0;
}

static int32_t run_alone(cp_engine *engine, cp_work *work, void *context)
{
    cp_team team = {0};
    cp_fpmode mode = cp_fpmode_enter();
    team.size = 1;
    team.engine = engine;
    reset_team(&team);
    work(&team, 0, context);
    cp_fpmode_leave(mode);
    return team.bad == UINT32_MAX ? -1 : (int32_t)team.bad;
}

#ifdef CP_THREADS

#define SPINS 1000 /* some 50 microseconds with the pause of recent x86 */
#define SPINS_ALONE 40 /* 2 microseconds; then whoever waits for this core is let in now and then */
/* Between the jobs of one token lies a turn of the caller, 0.2 to 0.5 ms: a helper that went to sleep
 * in it wakes late, with the core's clock down. */
#define LINGER_NS 1000000
#define LENT_NS 20000 /* a yield that took so long gave the core to somebody */

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Spins for SPINS, or for `linger_ns` where that is not 0 and nobody else wants this core, then
 * sleeps. */
static void wait_for_change(cp_engine *e, const uint32_t *word, uint32_t old, int64_t linger_ns)
{
    int64_t yielded_ns = linger_ns ? now_ns() : 0, until_ns = yielded_ns + linger_ns;
    int i;
    for (i = 0; linger_ns || i < SPINS; i++) {
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != old)
            return;
        relax();
        if (i % SPINS_ALONE == SPINS_ALONE - 1) {
            sched_yield(); /* the one we wait for may be waiting for this core */
            if (linger_ns) {
                int64_t now = now_ns();
                if (now > until_ns || now - yielded_ns > LENT_NS)
                    break;
                yielded_ns = now;
            }
        }
    }
    pthread_mutex_lock(&e->sleep);
    __atomic_fetch_add(&e->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == old)
        pthread_cond_wait(&e->wake, &e->sleep);
    __atomic_fetch_sub(&e->sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&e->sleep);
}

static void change(cp_engine *e, uint32_t *word)
{
    __atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
    /* A waiter counts itself, then looks at the word: one of the two sees the other. */
    if (__atomic_load_n(&e->sleepers, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&e->sleep);
        pthread_cond_broadcast(&e->wake);
        pthread_mutex_unlock(&e->sleep);
    }
}

int cp_barrier(cp_team *team)
{
    uint32_t phase = __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE);
    if (team->size == 1 ||
        __atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)team->size) {
        /* All others wait, so nobody sees these change: each reads them until the next barrier. */
        team->arrived = 0;
        team->next = 0;
        team->stop = team->bad != UINT32_MAX;
        if (team->size > 1)
            change(team->engine, &team->phase);
    } else {
        wait_for_change(team->engine, &team->phase, phase, 0);
    }
    return team->stop;
}

void cp_blame(cp_team *team, int32_t row)
{
    uint32_t least = __atomic_load_n(&team->bad, __ATOMIC_RELAXED);
    while ((uint32_t)row < least &&
           !__atomic_compare_exchange_n(&team->bad, &least, (uint32_t)row, 0, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
        ;
}

int32_t cp_next_unit(cp_team *team)
{
    return (int32_t)__atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED);
}

static void *help(void *argument)
{
    int32_t *number = argument; /* lies in the engine's array of numbers, at its own value */
    cp_engine *e = (cp_engine *)((char *)(number - *number) - offsetof(cp_engine, numbers));
    uint32_t seen = 0;
    cp_fpmode_enter();
    for (;;) {
        wait_for_change(e, &e->job, seen, LINGER_NS);
        seen++;
        if (__atomic_load_n(&e->quit, __ATOMIC_ACQUIRE))
            return NULL;
        e->work(&e->team, *number, e->context);
        cp_barrier(&e->team);
    }
}

static void start_helpers(cp_engine *e)
{
    sigset_t all, old;
    pthread_mutex_init(&e->sleep, NULL);
    pthread_cond_init(&e->wake, NULL);
    e->owner = getpid();
    e->job = e->sleepers = e->quit = 0;
    e->team.phase = 0;
    sigfillset(&all); /* signals are the caller's */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (e->helpers = 0; e->helpers < e->num_threads - 1; e->helpers++) {
        int32_t number = e->helpers + 1;
        e->numbers[number] = number;
        if (pthread_create(&e->threads[number], NULL, help, &e->numbers[number]))
            break; /* with fewer it is slower, not wrong */
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    e->team.size = e->helpers + 1;
    e->team.engine = e;
}

int32_t cp_run(cp_engine *e, cp_work *work, void *context)
{
    cp_fpmode mode;
    int32_t bad;
    if (e->num_threads == 1)
        return run_alone(e, work, context);
    if (e->owner && e->owner != getpid()) {
        pthread_mutex_init(&e->busy, NULL); /* a thread that does not exist here may have held it */
        e->owner = 0;
    }
    if (pthread_mutex_trylock(&e->busy))
        return run_alone(e, work, context);
    if (!e->owner)
        start_helpers(e);
    reset_team(&e->team);
    e->work = work;
    e->context = context;
    mode = cp_fpmode_enter();
    change(e, &e->job);
    work(&e->team, 0, context);
    cp_barrier(&e->team);
    cp_fpmode_leave(mode);
    bad = e->team.bad == UINT32_MAX ? -1 : (int32_t)e->team.bad;
    pthread_mutex_unlock(&e->busy);
    return bad;
}

#else

int cp_barrier(cp_team *team)
{
    team->next = 0;
    team->stop = team->bad != UINT32_MAX;
    return team->stop;
}

void cp_blame(cp_team *team, int32_t row)
{
    team->bad = (uint32_t)row < team->bad ? (uint32_t)row : team->bad;
}

int32_t cp_next_unit(cp_team *team)
{
    return (int32_t)team->next++;
}

int32_t cp_run(cp_engine *e, cp_work *work, void *context)
{
    return run_alone(e, work, context);
}

#endif

cp_engine *cp_engine_new(int32_t path, int32_t num_threads)
{
    cp_engine *e;
    if (!cp_has_path(path) || num_threads < 1 || (e = calloc(1, sizeof *e)) == NULL)
        return NULL;
    e->path = cp_path_at(path);
    e->num_threads = num_threads < MAX_THREADS ? num_threads : MAX_THREADS - 1;
    e->last_level_bytes = cp_last_level_bytes();
#ifdef CP_THREADS
    pthread_mutex_init(&e->busy, NULL);
#endif
    return e;
}

void cp_engine_free(cp_engine *e)
{
#ifdef CP_THREADS
    int32_t i;
    if (e->owner == getpid()) {
        e->quit = 1;
        change(e, &e->job);
        for (i = 1; i <= e->helpers; i++)
            pthread_join(e->threads[i], NULL);
    }
#endif
    free(e);
}

/* What the machine could do at most, measured on the threads that compute. */
#include "internal.h"

typedef struct {
    const cp_path *path;
    const uint8_t *bytes;
    uint64_t amount;
    uint64_t done[256];
} measure_job;

static void run_peak(cp_team *team, int32_t me, void *context)
{
    measure_job *job = context;
    job->done[me] = job->path->peak(job->amount);
    cp_barrier(team);
}

static void run_read(cp_team *team, int32_t me, void *context)
{
    measure_job *job = context;
    uint64_t pages = job->amount / 4096, n = (uint64_t)team->size;
    uint64_t first = pages * (uint64_t)me / n, end = pages * ((uint64_t)me + 1) / n;
    job->done[me] = job->path->read(job->bytes + first * 4096, (end - first) * 4096);
    cp_barrier(team);
}

static uint64_t total_of(cp_engine *engine, cp_work *work, measure_job *job)
{
    uint64_t total = 0;
    int32_t i;
    job->path = cp_engine_path(engine);
    for (i = 0; i < 256; i++)
        job->done[i] = 0;
    cp_run(engine, work, job);
    for (i = 0; i < 256; i++)
        total += job->done[i];
    return total;
}

uint64_t cp_peak(cp_engine *engine, uint64_t rounds)
{
    measure_job job;
    job.bytes = NULL;
    job.amount = rounds;
    return total_of(engine, run_peak, &job);
}

uint64_t cp_read(cp_engine *engine, const uint8_t *bytes, uint64_t n)
{
    measure_job job;
    job.bytes = bytes;
    job.amount = n;
    return total_of(engine, run_read, &job);
}

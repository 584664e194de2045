/* Threads that spin briefly for the next piece of work and then sleep, for regions that last microseconds.
 *
 * A region is a number of tasks that are taken one after another by whoever is free: the caller takes part and never waits for a thread
 * to arrive, only for tasks that were taken. When another program uses the cores, the caller does the work itself. A region inside a
 * region, and a region that starts while another caller's runs, is done by its caller alone. Results never depend on who does a task.
 */
#pragma once

#include <cstdint>
#include <type_traits>

namespace gnomon {

struct Pool {
    int threads; /* the caller among them */
};

/* The process's pool, seen with this many threads (at least one). They start on demand, at the first region that wants them. */
Pool& pool(int threads);

/* task(context, index, thread) for every index in [0, tasks), thread in [0, threads). */
void run_tasks(Pool& pool, int64_t tasks, void (*task)(void* context, int64_t index, int thread), void* context);

/* f(index, thread) for every index in [0, tasks). */
template <class F>
void parallel(Pool& pool, int64_t tasks, F&& f) {
    typedef typename std::remove_reference<F>::type Function;
    run_tasks(pool, tasks, [](void* context, int64_t index, int thread) { (*static_cast<Function*>(context))(index, thread); },
              const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace gnomon

/* Parallel regions of the operators that training calls between PyTorch's own: they use the OpenMP threads that PyTorch keeps warm, so
 * that no second set of threads waits for the same cores. Inference has a pool of its own (pool.h). */
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

/* f(task, thread) for every task in [0, tasks), in any order. */
template <class F>
void each_task(int threads, int64_t tasks, F&& f) {
    if (threads <= 1 || tasks <= 1) {
        for (int64_t task = 0; task < tasks; ++task) f(task, 0);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) f(task, omp_get_thread_num());
#else
    for (int64_t task = 0; task < tasks; ++task) f(task, 0);
#endif
}

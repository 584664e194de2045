/* See pool.h. One job at a time; whoever finds the slot taken works alone. */
#include "pool.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace gnomon {

namespace {

const int MOST = 256;              /* threads, the caller included */
const int64_t SPIN_NANOSECONDS = 40000; /* longer than the serial code between two regions of a layer, shorter than a scheduler's tick */

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t{1000000000} + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/* Work for the threads. `ticket` is the job's number (upper half) and the tasks that nobody took yet (lower half) in one word, so that a
 * late thread cannot take a task of a job other than the one it saw. */
struct Shared {
    std::mutex caller; /* held by the caller whose job this is */
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> unfinished{0};
    void (*task)(void*, int64_t, int) = nullptr;
    void* context = nullptr;
    int64_t tasks = 0;
    std::atomic<int> allowed{0}; /* threads that may take part in this job, besides the caller */
    alignas(64) std::mutex sleep;
    std::condition_variable wake;
    std::atomic<int> sleeping{0};
    int started = 0; /* under `caller` */
};

Shared* shared = new Shared; /* never freed: threads may outlive static objects */
thread_local bool inside = false;

/* Takes tasks of job `number` until none is left. */
void work(Shared& s, uint64_t number, int thread) {
    uint64_t ticket = s.ticket.load(std::memory_order_acquire);
    while ((ticket >> 32) == number && static_cast<uint32_t>(ticket) != 0) {
        if (!s.ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        s.task(s.context, s.tasks - static_cast<int64_t>(static_cast<uint32_t>(ticket)), thread);
        s.unfinished.fetch_sub(1, std::memory_order_release);
        ticket = s.ticket.load(std::memory_order_acquire);
    }
}

bool has_work(const Shared& s, int thread) {
    return static_cast<uint32_t>(s.ticket.load(std::memory_order_seq_cst)) != 0 && thread <= s.allowed.load(std::memory_order_relaxed);
}

void serve(Shared& s, int thread) {
    inside = true;
    for (;;) {
        const int64_t give_up = now() + SPIN_NANOSECONDS;
        bool found = has_work(s, thread);
        while (!found && now() < give_up) {
            for (int i = 0; i < 16 && !found; ++i) {
                relax();
                found = has_work(s, thread);
            }
        }
        if (!found) {
            std::unique_lock<std::mutex> lock(s.sleep);
            s.sleeping.fetch_add(1, std::memory_order_seq_cst);
            s.wake.wait(lock, [&] { return has_work(s, thread); });
            s.sleeping.fetch_sub(1, std::memory_order_seq_cst);
        }
        const uint64_t number = s.ticket.load(std::memory_order_acquire) >> 32;
        if (thread <= s.allowed.load(std::memory_order_acquire)) work(s, number, thread);
    }
}

void start(Shared& s, int wanted) {
    for (; s.started < wanted; ++s.started) {
        try {
            std::thread(serve, std::ref(s), s.started + 1).detach();
        } catch (const std::system_error&) {
            return; /* fewer threads are slower, not wrong */
        }
    }
}

/* A child process has only the thread that forked: it begins with no threads and with locks that nobody holds. */
void forget_threads() { shared = new Shared; }

void alone(int64_t tasks, void (*task)(void*, int64_t, int), void* context) {
    for (int64_t i = 0; i < tasks; ++i) task(context, i, 0);
}

}  // namespace

Pool& pool(int threads) {
    struct Views {
        Pool of[MOST + 1];
        Views() {
            for (int i = 0; i <= MOST; ++i) of[i].threads = std::max(1, i);
        }
    };
    static Views* views = new Views;
    return views->of[std::clamp(threads, 1, MOST)];
}

void run_tasks(Pool& pool, int64_t tasks, void (*task)(void*, int64_t, int), void* context) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
    (void)registered;
    Shared& s = *shared;
    if (pool.threads == 1 || tasks <= 1 || tasks > INT32_MAX || inside || !s.caller.try_lock()) return alone(tasks, task, context);
    inside = true;
    start(s, pool.threads - 1);
    s.task = task;
    s.context = context;
    s.tasks = tasks;
    s.unfinished.store(tasks, std::memory_order_relaxed);
    s.allowed.store(pool.threads - 1, std::memory_order_relaxed);
    const uint64_t number = (s.ticket.load(std::memory_order_relaxed) >> 32) + 1;
    s.ticket.store(number << 32 | static_cast<uint64_t>(tasks), std::memory_order_seq_cst);
    if (s.sleeping.load(std::memory_order_seq_cst)) {
        { std::lock_guard<std::mutex> lock(s.sleep); } /* a thread between its last look and its sleep would miss the call */
        s.wake.notify_all();
    }
    work(s, number & UINT32_MAX, 0);
    for (int turns = 0; s.unfinished.load(std::memory_order_acquire) != 0; ++turns) {
        if (turns < 2000) relax();
        else std::this_thread::yield(); /* the thread that holds the last task may be waiting for this core */
    }
    inside = false;
    s.caller.unlock();
}

}  // namespace gnomon

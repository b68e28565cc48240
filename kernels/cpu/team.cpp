// A team of threads that wait for work: spinning while the next work is likely to be near, so that
// the many short products of a decode step need no system call, and asleep after that.
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <exception>

#ifdef __x86_64__
// The version that glibc has always had, so that the library runs on older ones than it is built
// with: 2.34 only moved the function.
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
#endif

namespace {

// Between two products of a step lie up to 100 us; waking a thread takes about as long.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr int kSpinsPerLook = 64;  // at the clock

// Works that are done alone once a member kept its piece for longer than all the rest took: other
// processes have its core. Twice as many each time it happens again soon.
constexpr int kLeastAlone = 64, kMostAlone = 4096;

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until done() or for kSpin; whether it is done.
template <class Done>
bool spin(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kSpinsPerLook; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

struct Team {
  std::atomic<bool> taken{false};      // by the thread whose work it is
  std::atomic<uint32_t> round{0};      // counts works
  std::atomic<bool> open{false};       // whether members may still join the current one
  std::atomic<int> inside{0};          // members that have joined, or are about to see it closed
  std::atomic<int> asleep{0};
  int members = 0;
  // of the current work
  int wanted = 0;
  void (*work)(void*) = nullptr;
  void* context = nullptr;
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  // of the thread whose work it is
  int alone = 0;  // works to be done without members
  int next_alone = kLeastAlone, in_time = 0;

  void start(int count);
  void serve(int number);
  void call();
  void wait(std::chrono::nanoseconds own);
};

// Never freed: members outlive every destructor.
std::atomic<Team*> current{nullptr};
thread_local bool is_within = false;

struct Member {
  Team* team;
  int number;
};

void* run_member(void* argument) {
  const Member member = *static_cast<Member*>(argument);
  delete static_cast<Member*>(argument);
  is_within = true;
  member.team->serve(member.number);
  return nullptr;
}

// Signals are for the threads of Python. A thread that can't be had is done without.
void Team::start(int count) {
  if (members >= count) return;
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  for (; members < count; ++members) {
    pthread_t id;
    auto* argument = new Member{this, members};
    if (pthread_create(&id, &detached, run_member, argument) != 0) {
      delete argument;
      break;
    }
  }
  pthread_attr_destroy(&detached);
  sigprocmask(SIG_SETMASK, &before, nullptr);
}

void Team::serve(int number) {
  uint32_t seen = 0;
  for (;;) {
    const auto is_new = [&] { return round.load(std::memory_order_acquire) != seen; };
    if (!spin(is_new)) {
      ++asleep;
      // comes back at once where the round has changed since
      while (!is_new()) syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
      --asleep;
    }
    // either this thread sees the work closed, or the work's owner sees it inside
    ++inside;
    seen = round;
    if (open && number + 1 < wanted) call();
    --inside;
  }
}

void Team::call() {
  try {
    work(context);
  } catch (...) {
    if (!failed.exchange(true)) error = std::current_exception();
  }
}

// For the members that joined; `own` is what this thread took for its part.
void Team::wait(std::chrono::nanoseconds own) {
  const auto start = std::chrono::steady_clock::now();
  while (!spin([&] { return inside == 0; })) sched_yield();
  if (std::chrono::steady_clock::now() - start > std::max<std::chrono::nanoseconds>(own, kSpin)) {
    alone = next_alone;
    next_alone = std::min(2 * next_alone, kMostAlone);
    in_time = 0;
  } else if (++in_time == kMostAlone) {
    next_alone = kLeastAlone;
    in_time = 0;
  }
}

Team* team() {
  Team* found = current.load(std::memory_order_acquire);
  if (found) return found;
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    current = nullptr;  // a child has no threads but the one that forked
    is_within = false;
  });
  (void)registered;
  auto* made = new Team;
  if (current.compare_exchange_strong(found, made)) return made;
  delete made;
  return found;
}

}  // namespace

bool llmc_in_team() {
  return is_within;
}

void llmc_run_team(int threads, void (*work)(void*), void* context) {
  Team* t = threads > 1 && !is_within ? team() : nullptr;
  if (!t || t->taken.exchange(true)) return work(context);
  if (t->alone > 0) {
    --t->alone;
    t->taken = false;
    return work(context);
  }
  t->start(threads - 1);
  t->wanted = threads;
  t->work = work;
  t->context = context;
  is_within = true;
  t->open = true;
  ++t->round;
  if (t->asleep > 0) syscall(SYS_futex, &t->round, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  const auto start = std::chrono::steady_clock::now();
  t->call();
  t->open = false;
  t->wait(std::chrono::steady_clock::now() - start);
  is_within = false;
  const std::exception_ptr error = t->failed.exchange(false) ? std::move(t->error) : nullptr;
  t->taken = false;
  if (error) std::rethrow_exception(error);
}

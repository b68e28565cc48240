// A pool of threads that wait for work. They spin while more work is likely soon, so that the many
// short products of a decode step need no system calls, and then sleep.
#include "team.h"

#include "subnormals.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <exception>

#ifdef __x86_64__
// The symbol version that glibc has always had, so that the library runs with an older glibc than
// it was built with: 2.34 only moved the function.
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
#endif

namespace {

// Two products of a step can be up to 100 us apart; waking a thread takes about as long.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr int kSpinsPerLook = 64;  // between reads of the clock

// Members save time while they have a core. They cost time if the system preempts them in the
// middle of a piece, or runs them on this thread's core. The sum of both is kept, up to kMostSaved.
// A virtual machine loses a core for a moment hundreds of times per second, and the team is still
// worthwhile; but a busy process on a member's core uses up the sum. Then works run without members
// for a while, twice as long each time this happens again before the sum is full. Reading the
// CPU time is a system call, so while the sum is full, only one of kSampled works is measured, until
// one costs time.
constexpr int64_t kMostSaved = 20'000'000;  // ns
constexpr int kSampled = 8;
constexpr auto kLeastAlone = std::chrono::milliseconds(1);
constexpr auto kMostAlone = std::chrono::milliseconds(20);

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The CPU time of this thread, ns.
int64_t thread_time() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Spins until done(), for at most kSpin; returns whether it is done.
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
  std::atomic<bool> taken{false};      // in use by the owner of the current work
  std::atomic<uint32_t> round{0};      // counts works
  std::atomic<bool> open{false};       // whether members can still join the current work
  std::atomic<int> inside{0};          // members that have joined, or are about to see it closed
  std::atomic<int> helpers{0};         // members that have joined the current work
  std::atomic<int64_t> helped{0};      // the CPU time that they spent on it, ns
  std::atomic<int> asleep{0};
  int members = 0;
  // the current work
  int wanted = 0;
  bool is_measured = true;
  void (*work)(void*, int) = nullptr;
  void* context = nullptr;
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  // used only by the owner of the current work
  int64_t saved = kMostSaved;  // ns
  bool is_alone = false;       // works run without members until `alone_until`
  std::chrono::steady_clock::time_point alone_until;
  std::chrono::milliseconds next_alone = kLeastAlone;
  int unmeasured = 0;  // works since the last measured one

  void start(int count);
  void serve(int number);
  void call(int number);
  void lead();
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
  const llmc::FlushSubnormals flush;
  member.team->serve(member.number);
  return nullptr;
}

// Signals are left to Python's threads. If a thread can't be created, the team is smaller.
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
    auto* argument = new Member{this, members + 1};
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
      // returns immediately if the round has changed since
      while (!is_new()) syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
      --asleep;
    }
    // either this thread sees that the work is closed, or the work's owner sees this thread inside
    ++inside;
    seen = round;
    if (open && number < wanted) {
      ++helpers;
      if (is_measured) {
        const int64_t start = thread_time();
        call(number);
        helped += thread_time() - start;
      } else {
        call(number);
      }
    }
    --inside;
  }
}

void Team::call(int number) {
  try {
    work(context, number);
  } catch (...) {
    if (!failed.exchange(true)) error = std::current_exception();
  }
}

// Takes part in the work, waits for the members that joined, and updates the time that they saved:
// the time that this thread would have needed alone, minus the elapsed time. A member's time is
// capped at this thread's, so time that a hypervisor took from a member counts as lost.
void Team::lead() {
  using std::chrono::steady_clock;
  const auto start = steady_clock::now();
  const int64_t before = is_measured ? thread_time() : 0;
  call(0);
  const int64_t own = is_measured ? thread_time() - before : 0;
  open = false;
  while (!spin([&] { return inside == 0; })) sched_yield();
  if (helpers == 0 || !is_measured) return;
  const int64_t passed = std::chrono::nanoseconds(steady_clock::now() - start).count();
  saved += own + std::min<int64_t>(helped, own * helpers) - passed;
  if (saved < 0) {
    is_alone = true;
    alone_until = steady_clock::now() + next_alone;
    next_alone = std::min(2 * next_alone, kMostAlone);
    saved = 0;
  } else if (saved > kMostSaved) {
    next_alone = kLeastAlone;
    saved = kMostSaved;
  }
}

Team* team() {
  Team* found = current.load(std::memory_order_acquire);
  if (found) return found;
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    current = nullptr;  // a child has only the thread that forked
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

void llmc_run_team(int threads, void (*work)(void*, int), void* context) {
  Team* t = threads > 1 && !is_within ? team() : nullptr;
  if (!t || t->taken.exchange(true)) return work(context, 0);
  t->is_alone = t->is_alone && std::chrono::steady_clock::now() < t->alone_until;
  if (t->is_alone) {
    t->taken = false;
    return work(context, 0);
  }
  t->start(threads - 1);
  t->wanted = threads;
  t->work = work;
  t->context = context;
  is_within = true;
  t->unmeasured = t->saved == kMostSaved ? (t->unmeasured + 1) % kSampled : 0;
  t->is_measured = t->unmeasured == 0;
  t->helpers = 0;
  t->helped = 0;
  t->open = true;
  ++t->round;
  if (t->asleep > 0) syscall(SYS_futex, &t->round, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  t->lead();
  is_within = false;
  const std::exception_ptr error = t->failed.exchange(false) ? std::move(t->error) : nullptr;
  t->taken = false;
  if (error) std::rethrow_exception(error);
}

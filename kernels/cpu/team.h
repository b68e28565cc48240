// The thread pool that the kernels share.
#pragma once

extern "C" {

// Calls work(context, 0) on this thread, and concurrently work(context, n) with n from 1 on for up
// to `threads` - 1 others that wake up in time; returns when every call has returned. `work` should
// take pieces of the work until none are left. A thread that the system schedules late is then not
// waited for: another process on its core costs only that core's share. Runs on this thread alone
// if another thread uses the team, or if called from within `work`. Rethrows the first exception of
// `work`.
void llmc_run_team(int threads, void (*work)(void*, int), void* context);

// Whether this thread is within llmc_run_team.
bool llmc_in_team();
}

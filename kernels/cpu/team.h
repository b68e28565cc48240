// The threads that the kernels share.
#pragma once

extern "C" {

// Calls work(context, 0) on this thread, and beside it on up to `threads` - 1 others, with numbers
// from 1 on, as far as they are awake in time; returns when every call has. So `work` takes pieces of
// what is to be done until none are left, and a thread that the system runs late is not waited for:
// another process on its core costs its share and no more. Alone where another thread uses the team,
// or within its work. Throws what a call of `work` threw first.
void llmc_run_team(int threads, void (*work)(void*, int), void* context);

// Whether this thread is within llmc_run_team.
bool llmc_in_team();
}

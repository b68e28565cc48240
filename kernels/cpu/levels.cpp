// The levels in this library (LLMC_TABLES, from the build), and the current one.
#include "table.h"

#include <cstring>

#define LLMC_DECLARE(table) extern "C" const llmc::Kernels table;
LLMC_TABLES(LLMC_DECLARE)

#define LLMC_ADDRESS(table) &table,
static const llmc::Kernels* const kTables[] = {LLMC_TABLES(LLMC_ADDRESS)};

const llmc::Kernels* llmc::chosen_kernels = nullptr;

// Called once, before any op. Returns false if the library was built without that level.
extern "C" bool llmc_use_level(const char* name) {
  for (const llmc::Kernels* table : kTables)
    if (std::strcmp(table->level, name) == 0) {
      llmc::chosen_kernels = table;
      return true;
    }
  return false;
}

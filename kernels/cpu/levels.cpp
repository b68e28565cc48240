// Which levels are in this library (LLMC_TABLES, from the build), and which of them is in use.
#include "table.h"

#include <cstring>

#define LLMC_DECLARE(table) extern "C" const llmc::Kernels table;
LLMC_TABLES(LLMC_DECLARE)

#define LLMC_ADDRESS(table) &table,
static const llmc::Kernels* const kTables[] = {LLMC_TABLES(LLMC_ADDRESS)};

const llmc::Kernels* llmc::chosen_kernels = nullptr;

// Called once, before any op. False where the library was built without that level.
extern "C" bool llmc_use_level(const char* name) {
  for (const llmc::Kernels* table : kTables)
    if (std::strcmp(table->level, name) == 0) {
      llmc::chosen_kernels = table;
      return true;
    }
  return false;
}

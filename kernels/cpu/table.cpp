// The table of one level. The build defines its name (LLMC_TABLE) and its level (LLMC_LEVEL).
#include "table.h"

#define LLMC_ENTRY(name) &llmc::name,
extern "C" {
extern const llmc::Kernels LLMC_TABLE;
const llmc::Kernels LLMC_TABLE = {LLMC_LEVEL, LLMC_KERNELS(LLMC_ENTRY)};
}

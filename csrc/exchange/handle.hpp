// What a dispatch leaves for the combine that walks it back, and for dispatches that repeat its routing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace expertwire::exchange {

struct Handle {
    std::shared_ptr<const char> owner;  // identity of the Exchange that made it: another's handle is refused
    std::uint64_t epoch = 0;
    std::uint32_t rank = 0;
    std::uint32_t ranks = 0;
    std::uint32_t nodes = 0;
    std::uint64_t tokens = 0;                       // of this rank
    std::uint64_t rows_max = 0;                     // W of num_worst_tokens; 0: results are as long as what came
    std::vector<std::uint32_t> matrix;              // [source * ranks + destination]: rows
    std::vector<std::uint32_t> node_matrix;         // [source * nodes + node]: distinct rows
    std::vector<std::uint8_t> in_rank;              // [token * ranks + rank] of this rank's tokens
    std::vector<std::vector<std::uint64_t>> masks;  // [source][row * mask_words]: rows that entered my node through me

    std::uint32_t rows(std::uint32_t source, std::uint32_t destination) const {
        return matrix[std::size_t{source} * ranks + destination];
    }
    std::uint32_t node_rows(std::uint32_t source, std::uint32_t node) const {
        return node_matrix[std::size_t{source} * nodes + node];
    }
    std::uint64_t received(std::uint32_t destination) const {
        std::uint64_t total = 0;
        for (std::uint32_t source = 0; source < ranks; ++source) total += rows(source, destination);
        return total;
    }
    // Where the rows of `source` begin at `destination`: rows are ordered by source rank, then source token.
    std::uint64_t offset(std::uint32_t source, std::uint32_t destination) const {
        std::uint64_t total = 0;
        for (std::uint32_t before = 0; before < source; ++before) total += rows(before, destination);
        return total;
    }
};

}  // namespace expertwire::exchange

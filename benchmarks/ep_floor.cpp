// The bytes of a dispatch and of a combine moved by loops that do nothing else: rows copied in shared memory, rows
// through TCP sockets. What is counted stands in ep_floor.py, which compiles this and calls it in each rank's process.
#include <emmintrin.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr std::size_t kLine = 64;
constexpr int kPieces = 64;          // rows of one sendmsg at most
constexpr std::int64_t kBlock = 16;  // rows or tokens handled between two looks at the sockets
constexpr int kCollapse = 25;        // MADV_COLLAPSE

// Rows are multiples of 64 bytes at such addresses (ep_floor.py sees to it).
void copy(char* to, const char* from, std::size_t bytes, bool streaming) {
    if (!streaming) {
        std::memcpy(to, from, bytes);
        return;
    }
    for (std::size_t at = 0; at < bytes; at += kLine) {
        for (std::size_t part = 0; part < kLine; part += 16) {
            const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + part));
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + part), value);
        }
    }
}

}  // namespace

extern "C" {

// One direction of one rank. `tokens` are handled in order; token t has rows [first[t], first[t + 1]) in `place`.
struct Side {
    std::int64_t count;         // tokens, or rows that come
    const std::int64_t* first;  // [count + 1]
    char* const* place;  // where a row goes (dispatch) or comes from (combine), in the memory of a rank of the node
};

struct Work {
    int socket;  // to and from the rank of the same local index in the other node; both ends non-blocking
    std::int64_t row_bytes;
    const char* x;            // dispatch: [tokens][row_bytes]; combine: unused
    const std::int64_t* far;  // tokens of mine with ranks in the other node, ascending
    std::int64_t far_count;
    Side near;      // dispatch: of my tokens, the places in my node; combine: the rows in my node
    Side incoming;  // dispatch: of the rows that come, their places; combine: of the rows that I send, what is summed
    char* landing;  // [landing_rows][row_bytes]: what comes is read in here
    std::int64_t landing_rows;
    char* out;      // combine: [tokens][row_bytes], and a row behind them that stays in the cache
    int streaming;  // final places by stores past the caches
};

// In huge pages where the kernel has them, as ours is: `bytes` are whole ones. `fresh`: touched here first.
void* floor_map(int fd, std::size_t bytes, int fresh) {
    constexpr std::size_t huge = 2 << 20;
    void* const wide = mmap(nullptr, bytes + huge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (wide == MAP_FAILED) return nullptr;
    const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(wide) + huge - 1) / huge * huge;
    void* const at = mmap(reinterpret_cast<void*>(begin), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (at == MAP_FAILED) return nullptr;
    if (fresh != 0) std::memset(at, 0, bytes);
    madvise(at, bytes, kCollapse);
    return at;
}

}  // extern "C"

namespace {

// The stream of rows between two ranks: a socket, what has come of the current landing, what has gone.
struct Stream {
    const Work& work;
    std::int64_t came = 0;  // bytes
    std::int64_t went = 0;

    std::int64_t rows_came() const { return came / work.row_bytes; }

    // Into the landing, round and round; rows below `read` may be written over.
    bool receive(std::int64_t rows, std::int64_t read) {
        const std::int64_t size = work.landing_rows * work.row_bytes;
        bool moved = false;
        while (came < rows * work.row_bytes) {
            const std::int64_t at = came % size;
            const std::int64_t room =
                std::min({size - at, read * work.row_bytes + size - came, rows * work.row_bytes - came});
            if (room == 0) break;
            const ssize_t got = recv(work.socket, work.landing + at, static_cast<std::size_t>(room), 0);
            if (got <= 0) {
                if (got < 0 && errno == EAGAIN) break;
                std::abort();  // the parent sees the rank end
            }
            came += got;
            moved = true;
        }
        return moved;
    }

    template <class Row>  // Row(n): the address of the n-th row that is sent
    bool send_rows(std::int64_t rows, Row&& row) {
        bool moved = false;
        while (went < rows * work.row_bytes) {
            iovec pieces[kPieces];
            int count = 0;
            for (std::int64_t at = went; at < rows * work.row_bytes && count < kPieces; ++count) {
                const std::int64_t inside = at % work.row_bytes;
                pieces[count] = {const_cast<char*>(row(at / work.row_bytes)) + inside,
                                 static_cast<std::size_t>(work.row_bytes - inside)};
                at += work.row_bytes - inside;
            }
            msghdr message{};
            message.msg_iov = pieces;
            message.msg_iovlen = static_cast<std::size_t>(count);
            const ssize_t sent = sendmsg(work.socket, &message, MSG_NOSIGNAL);
            if (sent < 0) {
                if (errno == EAGAIN) break;
                std::abort();
            }
            went += sent;
            moved = true;
        }
        return moved;
    }

    void wait(bool to_send, bool to_receive) const {
        pollfd entry{work.socket, static_cast<short>((to_send ? POLLOUT : 0) | (to_receive ? POLLIN : 0)), 0};
        poll(&entry, 1, 1000);
    }
};

}  // namespace

extern "C" {

// Rows of mine to the ranks of my node, once to the other node; what comes from there to its places here.
void floor_dispatch(const Work* given) {
    const Work& work = *given;
    Stream stream{work};
    std::int64_t token = 0;
    std::int64_t placed = 0;
    const auto bytes = static_cast<std::size_t>(work.row_bytes);
    while (token < work.near.count || placed < work.incoming.count || stream.went < work.far_count * work.row_bytes) {
        bool moved =
            stream.send_rows(work.far_count, [&](std::int64_t n) { return work.x + work.far[n] * work.row_bytes; });
        moved |= stream.receive(work.incoming.count, placed);
        for (; placed < stream.rows_came(); ++placed, moved = true) {
            const char* const row = work.landing + placed % work.landing_rows * work.row_bytes;
            for (std::int64_t i = work.incoming.first[placed]; i < work.incoming.first[placed + 1]; ++i) {
                copy(work.incoming.place[i], row, bytes, work.streaming != 0);
            }
        }
        for (const std::int64_t end = std::min(work.near.count, token + kBlock); token < end; ++token, moved = true) {
            for (std::int64_t i = work.near.first[token]; i < work.near.first[token + 1]; ++i) {
                copy(work.near.place[i], work.x + token * work.row_bytes, bytes, work.streaming != 0);
            }
        }
        if (!moved) stream.wait(stream.went < work.far_count * work.row_bytes, placed < work.incoming.count);
    }
    _mm_sfence();
}

// For each row that the other node shall have: the rows here are read, one row is sent. For each token of mine: the
// rows here and the one that comes are read, one row is written. A row is read by copying it over one that stays in the
// cache.
void floor_combine(const Work* given) {
    const Work& work = *given;
    Stream stream{work};
    const std::int64_t tokens = work.near.count;
    const auto bytes = static_cast<std::size_t>(work.row_bytes);
    char* const hot = work.out + tokens * work.row_bytes;
    char* const sums = work.landing + work.landing_rows * work.row_bytes;  // as many rows again, to be sent from
    std::int64_t token = 0;
    std::int64_t summed = 0;
    std::int64_t taken = 0;
    const auto add = [&](const Side& side, std::int64_t n) {
        for (std::int64_t i = side.first[n]; i < side.first[n + 1]; ++i) std::memcpy(hot, side.place[i], bytes);
    };
    while (token < tokens || stream.went < work.incoming.count * work.row_bytes) {
        bool moved = false;
        const std::int64_t room = stream.went / work.row_bytes + work.landing_rows;
        for (const std::int64_t end = std::min({work.incoming.count, room, summed + kBlock}); summed < end;
             ++summed, moved = true) {
            add(work.incoming, summed);
            std::memcpy(sums + summed % work.landing_rows * work.row_bytes, hot, bytes);
        }
        moved |=
            stream.send_rows(summed, [&](std::int64_t n) { return sums + n % work.landing_rows * work.row_bytes; });
        moved |= stream.receive(work.far_count, taken);
        for (std::int64_t most = kBlock; token < tokens && most > 0; ++token, --most, moved = true) {
            const bool far = taken < work.far_count && work.far[taken] == token;
            if (far && taken == stream.rows_came()) break;
            add(work.near, token);
            if (far) std::memcpy(hot, work.landing + taken++ % work.landing_rows * work.row_bytes, bytes);
            copy(work.out + token * work.row_bytes, hot, bytes, work.streaming != 0);
        }
        if (!moved) stream.wait(stream.went < summed * work.row_bytes, taken < work.far_count);
    }
    _mm_sfence();
}

}  // extern "C"

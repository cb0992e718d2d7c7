#include "runtime/identity.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

namespace expertwire::runtime {

namespace {

std::string read_file(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return {};
    char buffer[1024];
    const ssize_t bytes = read(fd, buffer, sizeof buffer);
    close(fd);
    return bytes > 0 ? std::string(buffer, static_cast<std::size_t>(bytes)) : std::string();
}

std::uint64_t fnv(std::string_view text) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return hash;
}

}  // namespace

std::optional<std::uint64_t> start_time_of(std::int32_t pid) {
    const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
    // The name in parentheses may hold anything; the start time is the 20th field after it.
    std::size_t at = stat.rfind(')');
    if (at == std::string::npos) return std::nullopt;
    for (int field = 0; field < 20 && at != std::string::npos; ++field) at = stat.find(' ', at + 1);
    if (at == std::string::npos) return std::nullopt;
    std::uint64_t value = 0;
    const char* first = stat.data() + at + 1;
    if (std::from_chars(first, stat.data() + stat.size(), value).ec != std::errc()) return std::nullopt;
    return value;
}

ProcessIdentity own_identity() {
    ProcessIdentity self;
    self.pid = getpid();
    self.start_time = start_time_of(self.pid).value_or(0);
    const std::string boot = read_file("/proc/sys/kernel/random/boot_id");
    self.boot = boot.empty() ? 0 : fnv(boot);
    struct stat facts{};
    if (stat("/proc/self/ns/pid", &facts) == 0) self.pid_namespace = facts.st_ino;
    return self;
}

int open_pidfd(const ProcessIdentity& process, bool& gone) {
    gone = false;
    const ProcessIdentity self = own_identity();
    const bool visible = process.boot != 0 && process.boot == self.boot && process.pid_namespace != 0 &&
                         process.pid_namespace == self.pid_namespace && process.start_time != 0;
    if (!visible) return -1;
    const int fd = static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0));
    if (fd < 0) {
        gone = errno == ESRCH;
        return -1;
    }
    // Checked after opening: from now on the pid cannot be given to another process without this descriptor telling.
    if (start_time_of(process.pid) != process.start_time) {
        close(fd);
        gone = true;
        return -1;
    }
    return fd;
}

}  // namespace expertwire::runtime

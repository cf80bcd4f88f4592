// SPDX-License-Identifier: Apache-2.0
// For LD_PRELOAD: counts the C library's calls that change a file system, and at one of them kills the process or lets
// the disk fail. faults.py drives it. Python reaches the kernel through these functions alone.
// g++ -std=c++17 -O1 -Wall -Werror -fPIC -shared faults.cpp -o faults.so
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

enum Mode {
  kCount = 0,
  kKill = 1,  // SIGKILL before the call
  kTear = 2,  // a write puts down half of its bytes, a flush loses half of the file, as a power cut would; then SIGKILL
  kFail = 3,  // the call fails, the next ones work
  kFull = 4,  // from the call on, whatever takes room fails
};

long count_;
long at_ = -1;
int mode_;
int error_;
char log_[1 << 16];
size_t used_;

// Counts the call; -1 with errno set where it must fail. `room`: it takes room on the disk.
int enter(const char* name, bool room) {
  bool here = count_++ == at_;
  if (mode_ == kCount && used_ + strlen(name) + 2 < sizeof(log_)) used_ += sprintf(log_ + used_, "%s ", name);
  if (mode_ == kKill && here) raise(SIGKILL);
  if ((mode_ == kFail && here) || (mode_ == kFull && at_ >= 0 && count_ > at_ && room)) {
    errno = error_;
    return -1;
  }
  return 0;
}

bool tearing() { return mode_ == kTear && count_ - 1 == at_; }

// The size of a regular file, -1 for what is none.
off_t size_of(int fd) {
  struct stat st;
  return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? st.st_size : -1;
}

template <class F>
F* next(F*, const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// The C library's own function behind the one defined here.
#define NEXT(name) static auto real = next(&name, #name)
// A call that has nothing to do but be counted.
#define COUNTED(name, room, parameters, ...) \
  int name parameters {                      \
    NEXT(name);                              \
    if (enter(#name, room) != 0) return -1;  \
    if (tearing()) raise(SIGKILL);           \
    return real(__VA_ARGS__);                \
  }
// Opening counts where it makes or empties a file.
#define OPENING(name, parameters, ...)                                        \
  int name parameters {                                                       \
    NEXT(name);                                                               \
    va_list rest;                                                             \
    va_start(rest, flags);                                                    \
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                             \
    if ((flags & (O_CREAT | O_TRUNC)) && enter(#name, true) != 0) return -1;  \
    if ((flags & (O_CREAT | O_TRUNC)) && tearing()) raise(SIGKILL);           \
    return real(__VA_ARGS__, mode);                                           \
  }
// A flush or a change of length.
#define FLUSHING(name)                                           \
  int name(int fd) {                                             \
    NEXT(name);                                                  \
    if (enter(#name, size_of(fd) >= 0) != 0) return -1;          \
    if (tearing()) {                                             \
      off_t size = size_of(fd);                                  \
      static auto cut = next(&ftruncate64, "ftruncate64");       \
      if (size > 0 && cut(fd, size / 2) != 0) perror("tearing"); \
      raise(SIGKILL);                                            \
    }                                                            \
    return real(fd);                                             \
  }

extern "C" {

void tv_arm(long at, int mode, int error) {
  count_ = 0;
  used_ = 0;
  log_[0] = 0;
  at_ = at;
  mode_ = mode;
  error_ = error;
}

long tv_count() { return count_; }

const char* tv_log() { return log_; }

OPENING(open, (const char* path, int flags, ...), path, flags)
OPENING(open64, (const char* path, int flags, ...), path, flags)
OPENING(openat, (int at, const char* path, int flags, ...), at, path, flags)
OPENING(openat64, (int at, const char* path, int flags, ...), at, path, flags)

ssize_t write(int fd, const void* data, size_t size) {
  NEXT(write);
  if (fd <= 2 || size_of(fd) < 0) return real(fd, data, size);  // what is said, a pipe
  if (enter("write", true) != 0) return -1;
  if (tearing()) {
    if (real(fd, data, size / 2) < 0) perror("tearing");
    raise(SIGKILL);
  }
  return real(fd, data, size);
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
  NEXT(writev);
  if (size_of(fd) >= 0 && enter("writev", true) != 0) return -1;
  return real(fd, parts, count);
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) {
  NEXT(pwrite64);
  if (enter("pwrite64", true) != 0) return -1;
  return real(fd, data, size, at);
}

ssize_t sendfile64(int out, int in, off64_t* at, size_t size) {
  NEXT(sendfile64);
  if (enter("sendfile64", true) != 0) return -1;
  return real(out, in, at, size);
}

ssize_t copy_file_range(int in, off64_t* from, int out, off64_t* to, size_t size, unsigned flags) {
  NEXT(copy_file_range);
  if (enter("copy_file_range", true) != 0) return -1;
  return real(in, from, out, to, size, flags);
}

FLUSHING(fsync)
FLUSHING(fdatasync)
COUNTED(ftruncate64, true, (int fd, off64_t size) noexcept, fd, size)
COUNTED(truncate64, true, (const char* path, off64_t size) noexcept, path, size)
COUNTED(rename, false, (const char* from, const char* to) noexcept, from, to)
COUNTED(renameat, false, (int from_at, const char* from, int at, const char* to) noexcept, from_at, from, at, to)
COUNTED(unlink, false, (const char* path) noexcept, path)
COUNTED(unlinkat, false, (int at, const char* path, int flags) noexcept, at, path, flags)
COUNTED(rmdir, false, (const char* path) noexcept, path)
COUNTED(mkdir, true, (const char* path, mode_t mode) noexcept, path, mode)
COUNTED(mkdirat, true, (int at, const char* path, mode_t mode) noexcept, at, path, mode)
COUNTED(mknod, true, (const char* path, mode_t mode, dev_t device) noexcept, path, mode, device)
COUNTED(mkfifo, true, (const char* path, mode_t mode) noexcept, path, mode)
COUNTED(link, true, (const char* from, const char* to) noexcept, from, to)
COUNTED(linkat, true, (int from_at, const char* from, int at, const char* to, int flags) noexcept, from_at, from, at,
        to, flags)
COUNTED(symlink, true, (const char* to, const char* path) noexcept, to, path)
COUNTED(symlinkat, true, (const char* to, int at, const char* path) noexcept, to, at, path)
COUNTED(chmod, false, (const char* path, mode_t mode) noexcept, path, mode)
COUNTED(fchmod, false, (int fd, mode_t mode) noexcept, fd, mode)
COUNTED(fchmodat, false, (int at, const char* path, mode_t mode, int flags) noexcept, at, path, mode, flags)
COUNTED(chown, false, (const char* path, uid_t user, gid_t group) noexcept, path, user, group)
COUNTED(lchown, false, (const char* path, uid_t user, gid_t group) noexcept, path, user, group)
COUNTED(fchown, false, (int fd, uid_t user, gid_t group) noexcept, fd, user, group)
COUNTED(fchownat, false, (int at, const char* path, uid_t user, gid_t group, int flags) noexcept, at, path, user, group,
        flags)
COUNTED(utimensat, false, (int at, const char* path, const struct timespec* times, int flags) noexcept, at, path, times,
        flags)
COUNTED(futimens, false, (int fd, const struct timespec* times) noexcept, fd, times)

}  // extern "C"

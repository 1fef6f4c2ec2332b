{{/* What the pods of a part are found by. Arguments: root, part. */}}
{{- define "selector" -}}
app.kubernetes.io/name: {{ .root.Values.app | quote }}
app.kubernetes.io/component: {{ .part | quote }}
{{- end -}}

{{/* Its labels. Arguments: root, part, role. */}}
{{- define "labels" -}}
{{ include "selector" . }}
fleetplan/role: {{ .role | quote }}
{{- end -}}

{{/* The Deployment of a pool or of a router. Arguments: root, part, values; hasCache where it reads the cache. */}}
{{- define "deployment" -}}
{{- $values := .values }}
{{- $cache := .root.Values.modelCache }}
{{- $labels := include "labels" (dict "root" .root "part" .part "role" $values.role) }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .part | quote }}
  labels: {{- $labels | nindent 4 }}
spec:
  {{- if hasKey $values "replicas" }}
  replicas: {{ $values.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- include "selector" . | nindent 6 }}
  {{- with $values.strategy }}
  strategy: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.progressDeadlineSeconds }}
  progressDeadlineSeconds: {{ . }}
  {{- end }}
  template:
    metadata:
      labels: {{- $labels | nindent 8 }}
      {{- with $values.annotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- toYaml $values.pod | nindent 6 }}
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if .hasCache }}
      initContainers:
        - name: wait-for-models
          image: {{ $values.image | quote }}
          command: ["sh", "-c", {{ printf "until [ -e %s ]; do sleep 5; done" $cache.mark | quote }}]
          resources: {requests: {cpu: 100m, memory: 64Mi}}
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
          volumeMounts: [{name: models, mountPath: {{ $cache.folder | quote }}, readOnly: true}]
      {{- end }}
      containers:
        - image: {{ $values.image | quote }}
          args: {{- toYaml (concat $values.args $values.extraArgs) | nindent 12 }}
          env:
            {{- toYaml $values.env | nindent 12 }}
            {{- if .hasCache }}
            - {name: HF_HUB_CACHE, value: {{ $cache.folder | quote }}}
            - {name: HF_HUB_OFFLINE, value: "1"}
            {{- end }}
          resources: {{- toYaml $values.resources | nindent 12 }}
          {{- toYaml $values.container | nindent 10 }}
          volumeMounts:
            {{- toYaml $values.volumeMounts | nindent 12 }}
            {{- if .hasCache }}
            - {name: models, mountPath: {{ $cache.folder | quote }}, readOnly: true}
            {{- end }}
      volumes:
        {{- toYaml $values.volumes | nindent 8 }}
        {{- if .hasCache }}
        - {name: models, persistentVolumeClaim: {claimName: {{ $cache.claim | quote }}, readOnly: true}}
        {{- end }}
{{- end -}}
